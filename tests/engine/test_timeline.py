"""From the core's stops to spans."""

from __future__ import annotations

import logging

import pytest
from helpers.toy_engine import Toy, make_request, make_toy, run_load

from twostep.engine.device_idle import device_idle_share, host_overlap
from twostep.engine.timeline import LANES, StepSpan, Timeline


def timeline(toy: Toy) -> tuple[Timeline, list[StepSpan]]:
    spans: list[StepSpan] = []
    toy.executor.time_device()
    return Timeline(toy.clock, spans.append), spans


def check_lanes(spans: list[StepSpan]) -> None:
    """In each lane spans are in order and do not overlap."""
    for lane in LANES:
        edges = [edge for span in spans if span.lane == lane for edge in (span.start, span.end)]
        assert edges == sorted(edges), lane


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_every_step_has_every_lane(is_async: bool) -> None:
    toy = make_toy(is_async=is_async)
    observer, spans = timeline(toy)
    core = toy.core(observer)
    core.add_request(make_request("a", list(range(10, 30)), 5))
    while core.has_work():
        core.step_fn()
    check_lanes(spans)
    steps = {span.plan.step for span in spans if span.plan.tokens}
    for step in steps:
        mine = {span.lane: span for span in spans if span.plan.step == step}
        assert set(mine) == set(LANES)
        device = [s for s in spans if s.plan.step == step and s.lane == "device"]
        assert [s.name for s in device] == ["forward", "sample"]
        order = [mine["planning"], mine["launch"], mine["sampling"]]
        order += [mine["wait"], mine["update"], mine["output"]]
        assert [s.start for s in order] == sorted(s.start for s in order)
        assert mine["launch"].start < device[0].start
        # The wait begins when the core begins to wait, not when it has queued the next step.
        queued = [s.end for s in spans if s.lane == "sampling" and s.end <= mine["wait"].start]
        assert max(queued) < mine["wait"].start
        assert device[-1].end <= mine["wait"].end
    first = spans[0].plan
    assert (first.tokens, first.new, first.cached, first.blocks) == (16, 1, 0, 4)


def test_the_host_lanes_leave_no_hole_while_there_is_work() -> None:
    toy = make_toy()
    observer, spans = timeline(toy)
    core = toy.core(observer)
    core.add_request(make_request("a", [10, 11], 6))
    while core.has_work():
        core.step_fn()
    host = sorted((s.start, s.end) for s in spans if s.lane != "device")
    holes = [after[0] - before[1] for before, after in zip(host, host[1:], strict=False)]
    # One look at the clock where a step ends without news, two where the queue fills.
    assert max(holes) < 5e-5
    assert min(holes) >= 0


def test_nobody_waits_for_a_caller_who_has_gone() -> None:
    """After the last request the time until the next call is nobody's output."""
    toy = make_toy()
    observer, spans = timeline(toy)
    core = toy.core(observer)
    for request_id in ("a", "b"):
        core.add_request(make_request(request_id, [10, 11, 12], 3))
        while core.has_work():
            core.step_fn()
        toy.clock.now += 50.0
    core.add_request(make_request("c", [10, 11, 12], 10))
    core.step_fn()
    core.step_fn()
    core.abort_requests(["c"])
    toy.clock.now += 50.0
    while core.has_work():
        core.step_fn()
    outputs = [s for s in spans if s.lane == "output"]
    assert outputs
    assert all(s.end - s.start < 0.01 for s in outputs)
    assert device_idle_share(spans) < 0.5


def test_a_paused_core_is_not_busy() -> None:
    toy = make_toy()
    observer, spans = timeline(toy)
    core = toy.core(observer)
    core.add_request(make_request("a", [10, 11, 12], 10))
    for _ in range(3):
        core.step_fn()
    observer.called("pause", ("keep",))
    toy.clock.now += 50.0
    core.step_fn()
    assert all(s.end - s.start < 0.01 for s in spans if s.lane == "output")


def test_async_scheduling_overlaps_and_sync_does_not() -> None:
    """The very figures that the trace is for."""
    shares = {}
    for is_async in (True, False):
        toy = make_toy(is_async=is_async)
        observer, spans = timeline(toy)
        core = toy.core(observer)
        core.add_request(make_request("a", [10, 11, 12], 20))
        while core.has_work():
            core.step_fn()
        overlap = host_overlap(spans)
        assert overlap is not None
        shares[is_async] = (device_idle_share(spans), overlap)
    assert shares[True][0] < 0.02 < shares[False][0]
    assert shares[True][1] > 0.9 > 0.1 > shares[False][1]


def test_failures_and_void_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    toy = make_toy()
    observer, spans = timeline(toy)
    core = toy.core(observer)
    core.add_request(make_request("a", [10, 11, 12], 9))
    core.add_request(make_request("b", [20, 21, 22], 9))
    toy.executor.fail_result = lambda plan: RuntimeError("boom") if plan.step_id == 2 else None
    while core.has_work():
        core.step_fn()
    [failed] = [span for span in spans if span.failure is not None]
    assert (failed.lane, failed.plan.step) == ("wait", 2)
    assert failed.failure == "RuntimeError: boom"
    lanes_of_void = {span.lane for span in spans if span.plan.step == 3}
    assert lanes_of_void == {"planning", "launch", "sampling"}
    check_lanes(spans)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_random_load(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for seed in range(8):
        toy = make_toy(is_async=is_async)
        observer, spans = timeline(toy)
        run_load(toy, toy.core(observer), seed, faults=True)
        check_lanes(spans)
        assert {span.lane for span in spans} == set(LANES)
        assert not observer._counts or len(observer._counts) < 3, "what is in flight, no more"
