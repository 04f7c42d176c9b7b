"""A core that begins to load before anybody can talk to it never outlives those who began it."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import serve
from twostep.entrypoints.early_core import EarlyCore
from twostep.entrypoints.resolve import find_on_disk
from twostep.frontend.core_process import CoreProcess


def make_process() -> CoreProcess:
    """A child that would sleep for a long time."""
    program = "import time; time.sleep(600)"
    return CoreProcess(lambda wire, heartbeat: [sys.executable, "-c", program])


def test_nobody_took_it() -> None:
    process = make_process()
    with pytest.raises(UsageError), closing(EarlyCore(process)):
        raise UsageError("the port is taken")
    assert process.has_ended()


def test_somebody_took_it() -> None:
    process = make_process()
    try:
        with closing(EarlyCore(process)) as core:
            assert core.take() is process
            assert core.take() is None
        assert not process.has_ended()
    finally:
        process.abandon()


def test_a_flag_that_is_wrong_ends_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags are checked while it loads."""
    model = tmp_path / "tiny.gguf"
    model.touch()
    started = []

    def start(*args: object) -> CoreProcess:
        started.append(make_process())
        return started[-1]

    monkeypatch.setattr("twostep.entrypoints.async_engine.start_core_process", start)
    with pytest.raises(UsageError, match="--tool-call-parser"):
        serve.run([str(model), "--tool-call-parser", "nonsense"])
    [process] = started
    assert process.has_ended()


def test_a_model_that_has_to_be_fetched_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTEP_HOME", str(tmp_path))
    assert find_on_disk("smollm2-135m") is None
    assert find_on_disk("org/name") is None
    with closing(EarlyCore()) as core:
        assert core.take() is None
