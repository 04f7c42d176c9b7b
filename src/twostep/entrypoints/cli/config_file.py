"""``--config FILE``: flags of a command in a file of YAML. What the command line says wins."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli.args import Parser


def parse_with_config(make_parser: Callable[[], Parser], argv: Sequence[str]) -> argparse.Namespace:
    """Parse ``argv``, with what its ``--config FILE`` says in place of defaults.

    Keys of the file are names of flags without the dashes in front, as in vLLM's files; ``_`` is
    ``-``. Raises UsageError that names file and key.
    """
    args = make_parser().parse(argv)
    if args.config is None:
        return args
    parser = make_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # so that only what is said is there
    said = vars(parser.parse(argv))
    for name, value in _read(args.config).items():
        for dest, parsed in _parse_entry(parser, args.config, name, value).items():
            if dest not in said and not (dest == "model" and said.get("words")):
                setattr(args, dest, parsed)
    return args


def _read(file: str) -> dict[str, Any]:
    """The entries of a file."""
    import yaml  # huggingface_hub brings it anyway; loaded only for who has a file

    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read --config {file}: {reason}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(root, yaml.MappingNode):
            _check_keys([str(key.value) for key, _ in root.value], file)
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        words = " ".join(str(error).split())
        raise UsageError(f"--config {file} is not YAML: {words[:300]}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"--config {file} must be a list of `flag: value`, one a line")
    return found


def _check_keys(names: list[str], file: str) -> None:
    """YAML keeps the last of equal keys; whoever wrote both meant something else."""
    seen: set[str] = set()
    for name in names:
        name = name.replace("_", "-")
        if name in seen:
            raise UsageError(f"--config {file} sets {name} twice: leave one out")
        seen.add(name)


def _parse_entry(parser: Parser, file: str, name: Any, value: Any) -> dict[str, Any]:
    """One entry as the parser would have read it: {destination: value}."""
    where = f"--config {file}"
    flag = f"--{str(name).replace('_', '-')}"
    if flag in ("--config", "--help"):
        raise UsageError(f"{where} may not set {name}")
    try:
        parser._normalise([flag])
        return vars(parser.parse(_words(parser._option_string_actions[flag], flag, value)))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _words(action: argparse.Action, flag: str, value: Any) -> list[str]:
    """The entry as words of a command line."""
    if value is None:
        raise UsageError(f"{flag[2:]} has no value")
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise UsageError(f"{flag[2:]} must be true or false")
        if value:
            return [flag]
        negative = f"--no-{flag[2:]}"
        return [negative] if negative in action.option_strings else []
    if isinstance(value, bool):
        raise UsageError(f"{flag[2:]} takes a value, not {str(value).lower()}; put it in quotes")
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    if action.nargs == "+" or isinstance(action, argparse._AppendAction):
        entries = value if isinstance(value, list) else [value]
        if isinstance(action, argparse._AppendAction):
            return [f"{flag}={entry}" for entry in entries]
        return [flag, *map(str, entries)]
    if isinstance(value, list):
        raise UsageError(f"{flag[2:]} takes one value, not a list")
    return [f"{flag}={value}"]
