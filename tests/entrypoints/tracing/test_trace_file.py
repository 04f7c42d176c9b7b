"""The trace: valid JSON with every lane, arrows that meet, counters, and back to spans."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_engine import Toy, make_request, make_toy, run_load

from twostep.contracts.errors import TwostepError
from twostep.engine.device_idle import device_idle_share, host_overlap
from twostep.engine.timeline import LANES, StepSpan
from twostep.entrypoints.tracing.trace_file import THREADS, read_spans
from twostep.entrypoints.tracing.watch import Watch

Events = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def begin(toy: Toy, path: Path) -> tuple[Watch, Any]:
    watch = Watch(path, None)
    observer = watch.begin(toy.executor, toy.clock, toy.scheduler_config, toy.cache_config)
    return watch, toy.core(observer)


def traced_load(path: Path, seed: int = 1, *, is_async: bool = True) -> Watch:
    toy = make_toy(is_async=is_async)
    watch, core = begin(toy, path)
    run_load(toy, core, seed, faults=True)
    watch.close()
    return watch


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_valid_json_with_every_lane(tmp_path: Path, is_async: bool) -> None:
    path = tmp_path / "run.json"
    traced_load(path, is_async=is_async)
    events: Events = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == dict(enumerate(LANES, start=1))
    assert [e["args"] for e in events if e["name"] == "process_name"] == [{"name": "engine core"}]
    spans = [e for e in events if e["ph"] == "X"]
    assert {names[e["tid"]] for e in spans} == set(LANES)
    for thread in names:
        end = 0.0
        for event in (e for e in spans if e["tid"] == thread):
            assert event["ts"] >= end - 1e-9, event
            end = round(event["ts"] + event["dur"], 3)
    assert all(e["dur"] >= 0 for e in spans)
    planned = [e for e in spans if names[e["tid"]] == "planning"]
    steps = [e["args"]["step"] for e in planned]
    assert steps == list(range(len(steps))), "every plan is there, in order"
    assert sum(e["args"]["tokens"] for e in planned) > 100
    assert {"failed"} == {e["name"].split()[0] for e in spans if "failure" in e["args"]}


def test_arguments_and_counters(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    toy = make_toy(num_blocks=13)
    watch, core = begin(toy, path)
    core.add_request(make_request("a", list(range(10, 30)), 3))
    core.add_request(make_request("b", list(range(30, 35)), 3))
    while core.has_work():
        core.step_fn()
    watch.close()
    events: Events = json.loads(path.read_text())
    first = next(e for e in events if e["name"] == "planning 0")
    assert first["args"] == {
        "step": 0,
        "requests": 1,
        "tokens": 16,
        "new": 1,
        "cached": 0,
        "blocks": 4,
        "finished": 0,
        "preempted": 0,
    }
    update = next(e for e in events if e["name"] == "update 1")
    scheduled = update["args"]
    assert (scheduled["running"], scheduled["waiting"]) == (2, 0)
    # The plan of step 2 has its blocks already: "a" holds 6, "b" 2.
    assert scheduled["free_blocks"] == 12 - 8
    counters: dict[str, list[float]] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"]["value"])
    assert set(counters) == {
        "running requests", "waiting requests", "KV cache use, %", "tokens of a step",
    }  # fmt: skip
    assert counters["running requests"][-1] == 0
    assert counters["tokens of a step"][:3] == [16, 9, 2]
    for values in counters.values():
        assert all(a != b for a, b in zip(values, values[1:], strict=False)), "changes only"


def test_arrows_go_from_launch_over_the_device_to_the_update(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    traced_load(path)
    events: Events = json.loads(path.read_text())
    lane_of = {thread: lane for lane, thread in THREADS.items()}
    arrows: dict[int, list[tuple[str, str]]] = {}
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            arrows.setdefault(event["id"], []).append((event["ph"], lane_of[event["tid"]]))
            inside = [
                e
                for e in events
                if e["ph"] == "X"
                and e["tid"] == event["tid"]
                and e["args"]["step"] == event["id"]
                and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]
            ]
            assert inside, "an arrow needs a span to hold on to"
    shapes = Counter(tuple(arrow) for arrow in arrows.values())
    whole = (("s", "launch"), ("t", "device"), ("f", "update"))
    assert shapes[whole] > 20
    # A step without tokens never reaches the device; a failed or void one may not even start.
    allowed = {whole, (whole[0],), (whole[0], whole[2]), (whole[2],)}
    assert set(shapes) <= allowed


def test_back_to_spans(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    watch = traced_load(path)
    spans = read_spans(path)
    kept: list[StepSpan] = list(watch._spans)
    assert [(s.lane, s.name, s.plan, s.failure) for s in spans] == [
        (s.lane, s.name, s.plan, s.failure) for s in kept
    ]
    assert device_idle_share(spans) == pytest.approx(device_idle_share(kept), abs=1e-4)
    assert host_overlap(spans) == pytest.approx(host_overlap(kept), abs=1e-3)


def test_a_trace_that_was_not_closed_still_loads(tmp_path: Path) -> None:
    """The program was killed: what is on disk is an array without its end."""
    path = tmp_path / "run.json"
    toy = make_toy()
    watch, core = begin(toy, path)
    run_load(toy, core, 1, faults=False)
    text = path.read_text()
    assert not text.endswith("]")
    assert len(json.loads(text + "]")) > 500
    assert len(read_spans(path)) > 300
    watch.close()
    assert len(read_spans(path)) >= len(json.loads(text + "]")) // 2


@pytest.mark.parametrize("text", ["", "GGUF", "{}", "[1]", '[{"ph":"X"}]'])
def test_foreign_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(TwostepError, match="is not a trace of twostep"):
        read_spans(path)


def test_words_of_a_failure_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    toy = make_toy()
    watch, core = begin(toy, path)
    core.add_request(make_request("a", [10, 11], 3))
    toy.executor.fail_result = lambda plan: RuntimeError('a "quoted"\nline \\ and %d')
    for _ in range(4):
        core.step_fn()
    watch.close()
    failures = [s.failure for s in read_spans(path) if s.failure is not None]
    assert failures[0] == 'RuntimeError: a "quoted"\nline \\ and %d'
