"""Command-line plumbing shared by all commands: the parser, value types, the engine's flags."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from twostep.config.engine import DEFAULT_PREFILL_BURST_TOKENS
from twostep.contracts.errors import UsageError
from twostep.contracts.sampling import SamplingParams
from twostep.entrypoints.catalogue import DefaultSampling
from twostep.entrypoints.resolve import ResolvedModel
from twostep.entrypoints.tracing.output_file import check_writable

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>|[kKmMgGtT]|[KMGT]iB)", re.ASCII)
_EXPONENT = {"k": 1, "m": 2, "g": 3, "t": 4}


class Parser(argparse.ArgumentParser):
    """argparse with errors as one line, near names for slips, and ``_`` for ``-`` in flags."""

    def __init__(self, prog: str, operands: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=" ".join(f"{prog} {operands} [options]".split()),
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of ``argv``; raises UsageError for anything unknown or malformed."""
        args, unknown = self.parse_known_args(self._normalise(argv))
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return args

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that the program has one place for errors."""
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _normalise(self, argv: Sequence[str]) -> list[str]:
        """Spell every long flag with dashes; raises UsageError for one that does not exist."""
        known = [s for s in self._option_string_actions if s.startswith("--")]
        result: list[str] = []
        for position, word in enumerate(argv):
            if word == "--":
                return [*result, *argv[position:]]
            name, equals, value = word.partition("=")
            if name.startswith("--") and " " not in name:
                name = name.replace("_", "-")
                if name not in known:
                    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                    hint = f"; did you mean {near[0]}?" if near else ""
                    self.error(f"unknown flag {name}{hint}")
                word = name + equals + value
            result.append(word)
        return result


# -- value types ----------------------------------------------------------------------------------


def size(text: str) -> int:
    """A count: ``4096``, ``4k`` = 4,000, ``4K`` = 4,096, ``1.5G``, ``2GiB``."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: write 4096, 4k (4,000), 4K (4,096) or 2GiB"
        )
    unit = match["unit"]
    base = 1000 if unit.islower() else 1024
    factor = base ** _EXPONENT[unit[0].lower()] if unit else 1
    value = float(match["number"]) * factor
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def positive_size(text: str) -> int:
    """A size of 1 or more."""
    value = size(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def pooler_config(text: str) -> dict[str, Any]:
    """vLLM's ``--pooler-config``, as keyword arguments of ``LLM``."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    names = {"pooling_type": "pooling_type", "seq_pooling_type": "pooling_type"}
    names |= {"normalize": "normalize", "use_activation": "normalize"}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        if names[name] == "normalize":
            if not isinstance(value, bool):
                raise argparse.ArgumentTypeError(f"{name} must be true or false")
            found["normalize"] = value
            continue
        if str(value).upper() not in ("LAST", "MEAN", "CLS"):
            raise argparse.ArgumentTypeError(f"{name} must be LAST, MEAN or CLS")
        found["pooling_type"] = value.lower()
    return found


def utf8(text: str) -> str:
    """Text for a model; raises for bytes that were not UTF-8 (Python keeps them as surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the text is not valid UTF-8") from None
    return text


# -- the engine's flags ---------------------------------------------------------------------------


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine, spelled as vLLM spells them."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--chat-template", metavar="FILE", help="chat template other than the model's own")
    add(
        "--runner",
        choices=["auto", "generate", "pooling"],
        default="auto",
        help="generate text or make embeddings; auto (default): what the model is for",
    )
    add(
        "--convert",
        choices=["auto", "none", "embed"],
        default="auto",
        help="embed: make embeddings with a model that generates",
    )
    add(
        "--pooler-config",
        type=pooler_config,
        default={},
        metavar="JSON",
        help='how texts become vectors, {"pooling_type": "MEAN", "normalize": false}',
    )
    add("-q", "--quantization", metavar="TYPE", help="quantise weights at load: q8_0, q4_0, q4_1")
    add(
        "--linear-precision",
        choices=["auto", "int8", "bf16"],
        default="auto",
        help="activations of quantised layers: int8 (fast, default) or bf16 (exact)",
    )
    add(
        "--kv-cache-dtype",
        default="auto",
        choices=["auto", "bf16", "fp16", "fp32"],
        help="numbers of the KV cache",
    )
    add("--kv-cache-memory-bytes", type=positive_size, metavar="SIZE", help="default: by need")
    add("--max-model-len", type=positive_size, metavar="N", help="longest prompt and answer")
    add("--max-num-seqs", type=positive_size, metavar="N", help="requests running at once")
    add("--max-num-batched-tokens", type=positive_size, metavar="N", help="tokens of one step")
    add(
        "--scheduling-policy",
        default="fcfs",
        choices=["fcfs", "priority"],
        help="who runs first: first come, or the smallest priority",
    )
    add(
        "--long-prefill-token-threshold",
        type=size,
        default=0,
        metavar="N",
        help="most tokens of one prompt in a step beside others (0: no cap)",
    )
    add(
        "--prefill-burst-tokens",
        type=size,
        default=DEFAULT_PREFILL_BURST_TOKENS,
        metavar="N",
        help="most prompt tokens in a row that go first while a crowd waits (0: never)",
    )
    add(
        "--watermark",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="KV cache kept free when a request starts beside others, 0 to 1",
    )
    add("--enforce-eager", action="store_true", help="launch op by op, for debugging")
    add("-t", "--threads", type=positive_size, metavar="N", help="default: by cores and quota")
    for name, meaning in (
        ("enable-prefix-caching", "reuse the KV cache of equal beginnings"),
        ("enable-chunked-prefill", "cut long prompts into steps"),
        ("async-scheduling", "plan a step while the one before it runs"),
    ):
        add(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=meaning)
    add_watch_flags(parser)


def add_watch_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that runs an engine core; see ``entrypoints.tracing.watch``."""
    group = parser.add_argument_group("watching the engine")
    add = group.add_argument
    add("--trace", metavar="FILE", help="write a timeline of every step, for ui.perfetto.dev")
    add("--record", metavar="FILE", help="write plans and results, for `twostep replay FILE`")


def check_watch_flags(args: argparse.Namespace) -> None:
    """Raise UsageError if a file cannot be written, before anything is fetched or loaded."""
    for flag in ("trace", "record"):
        path = getattr(args, flag)
        if path is not None:
            check_writable(path, f"--{flag}")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of ``LLM`` from the flags of :func:`add_engine_flags`."""
    names = (
        "runner",
        "convert",
        "quantization",
        "linear_precision",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "scheduling_policy",
        "long_prefill_token_threshold",
        "prefill_burst_tokens",
        "watermark",
        "enforce_eager",
        "threads",
        "trace",
        "record",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "async_scheduling",
    )
    options = {name: getattr(args, name) for name in names}
    options |= args.pooler_config
    if args.chat_template is not None:
        options["chat_template"] = read_template(args.chat_template)
    return options


def options_for_one(args: argparse.Namespace, model: ResolvedModel) -> dict[str, Any]:
    """``engine_options`` of a command that talks to one person: small models compute exactly.

    Servers and benchmarks do what ``LLM`` does: the same bytes, at the same speed.
    """
    options = engine_options(args)
    if args.linear_precision == "auto" and model.entry is not None:
        options["linear_precision"] = model.entry.linear_precision
    return options


def read_template(name: str) -> str:
    """The text of a chat template's file."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read --chat-template {name}: {reason}") from error


# -- sampling flags -------------------------------------------------------------------------------


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: str) -> None:
    """Flags that choose tokens; ``max_tokens`` says the default of --max-tokens."""
    group = parser.add_argument_group("sampling (defaults: what the model's authors recommend)")
    add = group.add_argument
    add("--max-tokens", type=positive_size, metavar="N", help=f"default: {max_tokens}")
    add("--temperature", type=float, metavar="T", help="0 = always the likeliest token")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=int, metavar="K")
    add("--min-p", type=float, metavar="P")
    add("--presence-penalty", type=float, metavar="X")
    add("--frequency-penalty", type=float, metavar="X")
    add("--repetition-penalty", type=float, metavar="X")
    add("--seed", type=int, metavar="S", help="same seed, same answer")
    add("--stop", action="append", type=utf8, metavar="TEXT", help="end before TEXT (repeatable)")
    add("--ignore-eos", action="store_true", help="go on past the end-of-text token")


def sampling_params(
    args: argparse.Namespace, default: DefaultSampling, max_tokens: int | None
) -> SamplingParams:
    """Sampling parameters: the user's flags, else what the model recommends."""
    params = SamplingParams(
        temperature=default.temperature,
        top_p=default.top_p,
        top_k=default.top_k,
        max_tokens=max_tokens if args.max_tokens is None else args.max_tokens,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    for name in (*names, "repetition_penalty"):
        given = getattr(args, name)
        if given is not None:
            setattr(params, name, given)
    return params
