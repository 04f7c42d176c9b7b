"""``--trace`` and ``--record`` as files: created at once, never in the engine's way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from helpers.toy_engine import make_request, make_toy, run_load

from twostep.contracts.errors import UsageError
from twostep.engine.fan_out import FanOut
from twostep.engine.recording import Recording
from twostep.engine.replay import Replay, ReplayClock
from twostep.entrypoints.tracing.watch import Watch


def test_nothing_asked_nothing_done() -> None:
    toy = make_toy()
    watch = Watch(None, None)
    assert watch.begin(toy.executor, toy.clock, toy.scheduler_config, toy.cache_config) is None
    assert not toy.executor.times_device
    watch.close()
    assert watch.lines() == []


def test_both_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    trace, record = tmp_path / "run.json", tmp_path / "run.rec"
    toy = make_toy()
    watch = Watch(trace, record)
    observer = watch.begin(toy.executor, toy.clock, toy.scheduler_config, toy.cache_config)
    assert isinstance(observer, FanOut)
    assert toy.executor.times_device
    run_load(toy, toy.core(observer), 5, faults=True)
    watch.close()
    watch.close()
    assert len(json.loads(trace.read_text())) > 100
    with record.open("rb") as file:
        recording = Recording(file, "run.rec")
        assert Replay(recording, ReplayClock()).run() is None
        assert recording.is_complete
    [first, figures, last] = watch.lines()
    assert first == f"trace: {trace} (open it in ui.perfetto.dev or chrome://tracing)"
    assert figures.startswith("trace: device idle ")
    assert last == f"recording: {record} (twostep replay {record})"


def test_fan_out_tells_all_in_order() -> None:
    toy = make_toy()
    told: list[tuple[str, str]] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, method: str) -> object:
            return lambda *args: told.append((self.name, method))

    core = toy.core(FanOut([Listener("a"), Listener("b")]))  # type: ignore[list-item]
    core.add_request(make_request("r", [10, 11], 4))
    toy.executor.fail_result = lambda plan: RuntimeError("x") if plan.step_id == 2 else None
    while core.has_work():
        core.step_fn()
    methods = [method for name, method in told if name == "a"]
    assert told == [(name, method) for method in methods for name in ("a", "b")]
    assert set(methods) == {
        "called", "step_started", "scheduled", "launched", "sampling_launched", "waiting",
        "result_arrived", "step_failed", "updated", "step_finished",
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["--trace", "--record"])
def test_an_unwritable_path_is_told_at_once(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "no" / "folder" / "x"
    with pytest.raises(UsageError, match=rf"^{flag} .*/no/folder/x: No such file.*; name a file"):
        Watch(*((path, None) if flag == "--trace" else (None, path)))


def test_one_file_for_both(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give them two files"):
        Watch(tmp_path / "x", tmp_path / "x")


def test_an_old_file_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    watch = Watch(path, None)
    watch.close()
    assert path.read_text() == ""


def test_a_full_disk_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    for trace, record in (("/dev/full", None), (None, "/dev/full")):
        toy = make_toy()
        watch = Watch(trace, record)
        observer = watch.begin(toy.executor, toy.clock, toy.scheduler_config, toy.cache_config)
        run_load(toy, toy.core(observer), 1, faults=True)
        watch.close()
        assert any("/dev/full, INCOMPLETE: No space left" in line for line in watch.lines())
