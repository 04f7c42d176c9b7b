"""``twostep COMMAND``: finds the command, loads only its module, turns errors into one line."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import twostep
from twostep.contracts.errors import TwostepError, UsageError

COMMANDS: tuple[tuple[str, str], ...] = (
    ("chat", "talk to a model"),
    ("complete", "continue a text"),
    ("serve", "answer over HTTP, as OpenAI's API does"),
    ("run-batch", "answer a file of requests, without a server"),
    ("pull", "fetch a model"),
    ("models", "list the models that have a name, and what is on disk"),
    ("bench", "measure a part of the engine on this machine"),
    ("simulate", "predict speed on devices that are not here; check the engine's rules"),
    ("tour", "one engine step, executed and looked at, stop by stop"),
    ("replay", "run a recording again and compare its plans"),
    ("doctor", "what this machine can do: CPU features, threads, memory bandwidth, kernels"),
    ("collect-env", "versions and settings, for bug reports"),
)
"""(name, what it does); the module of a command has its name, with ``_`` for ``-``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 ok, 1 failure, 2 usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal may not know every character
    # Nothing here multiplies with NumPy, and the threads that it starts to do so spin for a tenth
    # of a second: time that a start has on the other cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    debug = os.environ.get("TWOSTEP_DEBUG", "") not in ("", "0")
    try:
        return dispatch(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        if debug:
            raise
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`twostep … | head`): nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TwostepError as error:
        if debug:
            raise
        print(f"twostep: error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if debug:
            raise
        print(
            f"twostep: internal error: {type(error).__name__}: {one_line(error)} "
            "(please report it, with the traceback that TWOSTEP_DEBUG=1 shows)",
            file=sys.stderr,
        )
        return 1


def dispatch(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` names."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"twostep {twostep.__version__}")
        return 0
    name = argv[0].replace("_", "-")
    names = [command for command, _ in COMMANDS]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
        raise UsageError(f"unknown command {argv[0]!r}: {hint} (see `twostep --help`)")
    module = importlib.import_module(f"twostep.entrypoints.cli.{name.replace('-', '_')}")
    result: int = module.run(list(argv[1:]))
    return result


def help_text() -> str:
    """What ``twostep --help`` prints."""
    lines = [
        "usage: twostep COMMAND …",
        "",
        "An LLM inference engine with two steps in flight.",
        "",
        'twostep chat "What is the capital of France?"',
        'twostep complete smollm2-135m "Once upon a" --max-tokens 32 --json',
        "twostep doctor",
        "",
        "commands (each has --help):",
        *(f"  {name:<13}{meaning}" for name, meaning in COMMANDS),
        "",
        "options:",
        "  -h, --help    this text",
        "  -V, --version",
        "",
        "MODEL is a name from `twostep models`, a .gguf file, a directory in Hugging Face",
        "layout, or a Hub repository (org/name, org/name:Q8_0).",
    ]
    return "\n".join(lines)


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
