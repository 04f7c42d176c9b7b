"""What the benches that run a model share: flags, prompts, percentiles, where results go."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console
from twostep.entrypoints.cli.engine import Engine
from twostep.entrypoints.load.results import percentile
from twostep.entrypoints.resolve import ResolvedModel, resolve
from twostep.entrypoints.tracing.output_file import check_writable

PERCENTAGES = (10, 25, 50, 75, 90, 99)
HIGHEST_TOKEN_ID = 10_000
"""Random prompts are made of the first ids of a vocabulary: ordinary tokens, mostly."""

Clock = Callable[[], float]


class Vocabulary(Protocol):
    """What a bench asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ...


class BenchEngine(Engine, Protocol):
    """What a bench asks of ``LLM``."""

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        ...


def make_parser(name: str, description: str) -> cli_args.Parser:
    """A parser with the model, where results go, and the engine's flags."""
    parser = cli_args.Parser(f"twostep bench {name}", "[MODEL]", description)
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same")
    parser.add_argument("--output-json", metavar="FILE", help="write the results to a file")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    cli_args.add_engine_flags(parser)
    return parser


def model_named(args: argparse.Namespace) -> str:
    """The model, by either spelling; raises UsageError for none or two."""
    if args.model is not None and args.model_flag is not None:
        raise UsageError("name the model once: as MODEL or with --model")
    name: str | None = args.model if args.model is not None else args.model_flag
    if name is None:
        raise UsageError("say which model to measure: MODEL or --model MODEL")
    return name


def find_model(args: argparse.Namespace, reporter: Any) -> ResolvedModel:
    """Check the files to be written, then find (or fetch) the model."""
    name = model_named(args)
    cli_args.check_watch_flags(args)
    if args.output_json is not None:
        check_writable(args.output_json, "--output-json")
    return resolve(name, reporter)


def random_ids(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` random token ids."""
    source = random.Random(seed)
    ids = range(min(HIGHEST_TOKEN_ID, vocab_size))
    return [source.choices(ids, k=length) for _ in range(count)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """{"10": …, "25": …, …}, linear between values."""
    return {str(percent): percentile(values, percent) for percent in PERCENTAGES}


def deliver(results: dict[str, Any], lines: Sequence[str], args: argparse.Namespace) -> None:
    """Write ``--output-json``; print the JSON document with ``--json``, else the lines."""
    if args.output_json is not None:
        text = json.dumps(results, indent=4, allow_nan=False)
        Path(args.output_json).expanduser().write_text(text + "\n", encoding="utf-8")
    if args.json:
        console.print_json(results)
    else:
        print("\n".join(lines))
