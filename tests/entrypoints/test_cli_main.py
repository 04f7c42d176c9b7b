"""Finding the command; errors as one line with the right exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import twostep
from twostep.contracts.errors import ModelError, UsageError
from twostep.entrypoints.cli import main as cli
from twostep.entrypoints.cli import models

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help(argv: list[str], capsys: Capture) -> None:
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command, _ in cli.COMMANDS:
        assert command in out


def test_version(capsys: Capture) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"twostep {twostep.__version__}\n"


@pytest.mark.parametrize("command", [name for name, _ in cli.COMMANDS])
def test_every_command_has_help(command: str, capsys: Capture) -> None:
    try:
        code: int | str | None = cli.main([command, "--help"])
    except SystemExit as stop:
        code = stop.code
    assert code == 0
    assert f"usage: twostep {command}" in capsys.readouterr().out


@pytest.mark.parametrize("spelling", ["collect-env", "collect_env"])
def test_dash_and_underscore_in_commands(spelling: str, capsys: Capture) -> None:
    assert cli.main([spelling, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["twostep"]["version"] == twostep.__version__


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["chta"], "unknown command 'chta': did you mean chat?"),
        (["zzz"], "unknown command 'zzz': one of chat, complete"),
        (["models", "--jsn"], "unknown flag --jsn; did you mean --json?"),
        (["models", "extra"], "unexpected argument 'extra'"),
        (["complete"], "the following arguments are required: MODEL"),
        (["complete", "m", "p", "--max-model-len", "4x"], "'4x' is not a size"),
        (["complete", "m", "p", "--threads", "0"], "must be at least 1"),
        (["chat", "a", "b", "c"], "put the prompt in quotes"),
        (["chat", "hi", "--linear-precision", "fp4"], "invalid choice: 'fp4'"),
    ],
)
def test_usage_errors(argv: list[str], text: str, capsys: Capture) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert err.startswith("twostep: error: ")
    assert err.count("\n") == 1


def raising(error: BaseException) -> Callable[[list[str]], int]:
    def run(argv: list[str]) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ModelError("file x\nis broken"), 1, "twostep: error: file x is broken\n"),
        (UsageError("no"), 2, "twostep: error: no\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("oops"), 1, "twostep: internal error: ZeroDivisionError: oops (please"),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: BaseException, code: int, text: str
) -> None:
    monkeypatch.setattr(models, "run", raising(error))
    assert cli.main(["models"]) == code
    err = capsys.readouterr().err
    assert err.startswith(text)
    assert "Traceback" not in err
    assert err.count("\n") <= 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_DEBUG", "1")
    monkeypatch.setattr(models, "run", raising(ModelError("x")))
    with pytest.raises(ModelError):
        cli.main(["models"])


def test_reader_that_goes_away(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """``twostep models | head -n 1`` ends without a traceback."""
    replaced: list[int] = []
    monkeypatch.setattr(cli.os, "dup2", lambda source, target: replaced.append(target))
    monkeypatch.setattr(models, "run", raising(BrokenPipeError()))
    assert cli.main(["models"]) == 1
    assert len(replaced) == 1
    assert capfd.readouterr().err == ""


def test_numpy_starts_no_threads_of_its_own() -> None:
    """They would spin while a model loads."""
    program = """
import os, sys
from twostep.entrypoints.cli.main import main
main(["--version"])
import numpy
print(len(os.listdir("/proc/self/task")))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS", "OMP"))}
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.split()[-1] == "1"
