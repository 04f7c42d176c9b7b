"""``twostep complete`` with a fake engine."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.errors import TwostepError, UsageError
from twostep.entrypoints.cli import complete, console

Capture = pytest.CaptureFixture[str]


def test_streams_the_text(factory: Any, gguf: Path, capsys: Capture) -> None:
    assert complete.run([str(gguf), "Once"], factory) == 0
    assert capsys.readouterr().out == "The capital is Paris.\n"
    assert factory.engine.asked == ["Once"]
    assert factory.engine.params[0].max_tokens == complete.DEFAULT_MAX_TOKENS
    assert factory.engine.closed


def test_json(factory: Any, gguf: Path, capsys: Capture) -> None:
    argv = [str(gguf), "Once", "--json", "--logprobs", "1", "-n", "2", "--seed", "5"]
    assert complete.run(argv, factory) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == "Once"
    assert found["prompt_token_ids"] == [1, 2, 3]
    assert [c["index"] for c in found["choices"]] == [0, 1]
    assert found["usage"]["completion_tokens"] == 6
    first = found["choices"][0]
    assert first["text"] == "The capital is Paris."
    assert first["cumulative_logprob"] == -1.5
    assert first["logprobs"][0]["token_id"] == 10
    assert [t["token_id"] for t in first["logprobs"][0]["top"]] == [10, 99]
    params = factory.engine.params[0]
    assert (params.n, params.logprobs, params.seed) == (2, 1, 5)


def test_json_holds_no_infinity(factory: Any, gguf: Path, capsys: Capture) -> None:
    complete.run([str(gguf), "Once", "--json", "--logprobs", "1"], factory)
    out = capsys.readouterr().out
    assert "Infinity" not in out
    [chosen] = json.loads(out)["choices"]
    assert chosen["logprobs"][0]["top"][1]["logprob"] == -9999.0


def test_json_without_logprobs(factory: Any, gguf: Path, capsys: Capture) -> None:
    complete.run([str(gguf), "Once", "--json"], factory)
    [chosen] = json.loads(capsys.readouterr().out)["choices"]
    assert chosen["logprobs"] is None
    assert chosen["cumulative_logprob"] is None


def test_table_of_logprobs(factory: Any, gguf: Path, capsys: Capture) -> None:
    complete.run([str(gguf), "Once", "--logprobs", "1"], factory)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "The capital is Paris."
    assert lines[1].split() == ["token", "logprob", "likeliest"]
    assert len(lines) == 2 + 3


def test_several_completions_for_people(factory: Any, gguf: Path, capsys: Capture) -> None:
    complete.run([str(gguf), "Once", "-n", "2"], factory)
    assert capsys.readouterr().out.splitlines() == [
        "[0]",
        "The capital is Paris.",
        "[1]",
        "The capital is Paris.",
    ]


def test_prompt_from_a_pipe(factory: Any, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped text\n"))
    complete.run([str(gguf)], factory)
    assert factory.engine.asked == ["piped text"]


def test_no_prompt(factory: Any, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "stdin_is_terminal", lambda: True)
    with pytest.raises(UsageError, match="no PROMPT"):
        complete.run([str(gguf)], factory)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_engine_error(factory: Any, gguf: Path, flags: list[str], capsys: Capture) -> None:
    factory.finish_reason = "error"
    with pytest.raises(TwostepError, match="failed on this prompt"):
        complete.run([str(gguf), "Once", *flags], factory)


def test_ctrl_c(factory: Any, gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(complete, "show", lambda text: os.kill(os.getpid(), signal.SIGINT))
    assert complete.run([str(gguf), "Once"], factory) == 130
    assert factory.engine.aborted == 1
