"""Flags that hold an answer to a form: --json-schema, --regex, --choice, --grammar."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from twostep.contracts.errors import UsageError
from twostep.contracts.sampling import SamplingParams, StructuredOutputsParams
from twostep.entrypoints.cli.args import utf8


def add_structured_flags(parser: argparse.ArgumentParser) -> None:
    """Add them; at most one may be used."""
    group = parser.add_argument_group("the form of the answer (at most one)")
    add = group.add_argument
    add("--json-schema", type=utf8, metavar="FILE|TEXT", help="JSON of this schema")
    add("--regex", type=utf8, metavar="R", help="a text that R matches as a whole")
    add(
        "--choice",
        action="append",
        type=utf8,
        metavar="TEXT",
        help="one of several texts (repeat the flag)",
    )
    add("--grammar", metavar="FILE", help="a text of this grammar (Lark or GBNF)")


def structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """What the flags ask for; None if there are none.

    Raises UsageError for two of them, a file that cannot be read, and a schema that is no JSON.
    """
    given = [
        flag
        for flag in ("json_schema", "regex", "choice", "grammar")
        if getattr(args, flag) is not None
    ]
    if len(given) > 1:
        names = " and ".join("--" + flag.replace("_", "-") for flag in given)
        raise UsageError(f"{names} exclude each other: give one")
    if args.json_schema is not None:
        return StructuredOutputsParams(json=_schema(args.json_schema))
    if args.regex is not None:
        return StructuredOutputsParams(regex=args.regex)
    if args.choice is not None:
        return StructuredOutputsParams(choice=tuple(args.choice))
    if args.grammar is not None:
        return StructuredOutputsParams(grammar=_read(args.grammar, "--grammar"))
    return None


def say_if_cut(params: SamplingParams, finish_reason: str | None) -> None:
    """An answer that was cut does not keep its form: say so on standard error."""
    if params.structured_outputs is not None and finish_reason == "length":
        print(
            "twostep: the answer is cut and has not the form that was asked for: "
            "raise --max-tokens (or --max-model-len)",
            file=sys.stderr,
        )


def _schema(given: str) -> str:
    """A schema's text. What begins like a JSON object is one; all else names a file."""
    text = given.strip()
    origin = "--json-schema"
    if not text.startswith("{") and text not in ("true", "false"):
        text = _read(given, "--json-schema")
        origin = f"--json-schema {given}"
    try:
        schema: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin} is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise UsageError(f"{origin} is not a JSON schema: a schema is an object")
    return text


def _read(name: str, flag: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {flag} {name}: {reason}") from None
