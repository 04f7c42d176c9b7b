"""Help that fits a screen: the flags that matter; ``--help=all|GROUP|FLAG|env`` is the rest.

``--help-all`` is another way to write ``--help=all``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from twostep.contracts.errors import UsageError
from twostep.entrypoints import environment
from twostep.entrypoints.cli.console import table

SHORT = (
    ("server", ("host", "port", "api-key", "ssl-certfile", "config")),
    (
        "model and answers",
        ("served-model-name", "chat-template", "tool-call-parser", "reasoning-parser"),
    ),
    ("limits", ("max-num-queued-reqs", "request-timeout", "shutdown-timeout")),
    (
        "engine",
        (
            "max-model-len",
            "max-num-seqs",
            "max-num-batched-tokens",
            "kv-cache-memory-bytes",
            "quantization",
            "threads",
        ),
    ),
    ("logs", ("log-format", "enable-log-requests")),
)
"""What the first page of ``serve`` shows, by group."""


def show_help(parser: argparse.ArgumentParser, argv: Sequence[str]) -> bool:
    """Print what a help flag in ``argv`` asks for; False if there is none."""
    for word in argv:
        if word == "--":
            return False
        if word in ("-h", "--help"):
            print(short_page(parser))
            return True
        if word.replace("_", "-") == "--help-all":
            print(page(parser, "all"))
            return True
        if word.startswith("--help="):
            print(page(parser, word.removeprefix("--help=")))
            return True
    return False


def short_page(parser: argparse.ArgumentParser) -> str:
    """Usage, examples and the flags that matter."""
    actions = _by_flag(parser)
    lines = [parser.format_usage().rstrip(), "", (parser.description or "").rstrip()]
    for title, names in SHORT:
        lines += ["", f"{title}:"]
        lines += _rows([actions[f"--{name}"] for name in names])
    groups = "|".join(group_name(group) for group in _groups(parser))
    lines += ["", f"more: --help-all, --help=env, --help=FLAG, --help={groups}"]
    return "\n".join(lines)


def page(parser: argparse.ArgumentParser, topic: str) -> str:
    """``all``, ``env``, a group or a flag. Raises UsageError for anything else."""
    if topic == "all":
        return parser.format_help().rstrip()
    if topic == "env":
        return table([list(row) for row in environment.VARIABLES])
    for group in _groups(parser):
        if topic.lower() in (group_name(group), (group.title or "").lower()):
            return "\n".join([f"{group.title}:", *_rows(group._group_actions)])
    flag = "--" + topic.lstrip("-").replace("_", "-")
    if (action := _by_flag(parser).get(flag)) is not None:
        return "\n".join(_rows([action]))
    names = ", ".join(group_name(group) for group in _groups(parser))
    raise UsageError(f"no help on {topic!r}: all, env, a flag, or one of {names}")


def group_name(group: argparse._ArgumentGroup) -> str:
    """The first word of a group's title."""
    return (group.title or "").split()[0].lower()


def _groups(parser: argparse.ArgumentParser) -> list[argparse._ArgumentGroup]:
    standard = ("positional arguments", "options")
    return [group for group in parser._action_groups if group.title not in standard]


def _by_flag(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return dict(parser._option_string_actions)


def _rows(actions: Sequence[argparse.Action]) -> list[str]:
    rows = []
    for action in actions:
        value = ""
        if action.nargs != 0:
            value = str(action.metavar or "|".join(map(str, action.choices or ())) or "VALUE")
            value += " ..." if action.nargs == "+" else ""
        flags = [flag for flag in action.option_strings if not flag.startswith("--no-")]
        rows.append([f"{', '.join(flags)} {value}".rstrip(), action.help or ""])
    return table(rows, indent="  ").splitlines()
