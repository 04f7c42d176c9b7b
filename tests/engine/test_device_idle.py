"""Overlap of host and device, on spans made by hand."""

from __future__ import annotations

import pytest

from twostep.engine.device_idle import (
    device_idle_share,
    gap_histogram,
    host_overlap,
    idle_gaps,
    idle_share_by_kind,
)
from twostep.engine.timeline import Lane, PlanCounts, StepSpan


def plan(step: int, tokens: int = 1, requests: int = 1) -> PlanCounts:
    return PlanCounts(
        step=step,
        requests=requests,
        tokens=tokens,
        new=0,
        cached=requests,
        blocks=0,
        finished=0,
        preempted=0,
    )


def span(lane: Lane, start: float, end: float, step: int = 0, tokens: int = 1) -> StepSpan:
    return StepSpan(lane=lane, name=lane, start=start, end=end, plan=plan(step, tokens))


SYNC = [
    span("planning", 0, 1, 0),
    span("launch", 1, 2, 0),
    span("device", 2, 10, 0),
    span("wait", 2, 10, 0),
    span("update", 10, 11, 0),
    span("output", 11, 12, 0),
    span("planning", 12, 13, 1),
    span("launch", 13, 14, 1),
    span("device", 14, 22, 1),
    span("wait", 14, 22, 1),
    span("update", 22, 23, 1),
]
"""One step at a time: the device waits for 4 of 20 seconds between its first and last work."""


def test_a_device_that_waits_for_the_host() -> None:
    assert device_idle_share(SYNC) == pytest.approx(4 / 20)
    assert host_overlap(SYNC) == 0
    [gap] = idle_gaps(SYNC)
    assert (gap.start, gap.end, gap.seconds, gap.before.step) == (10, 14, 4, 1)


def test_the_order_of_spans_does_not_matter() -> None:
    assert device_idle_share(SYNC[::-1]) == device_idle_share(SYNC)
    assert idle_gaps(SYNC[::-1]) == idle_gaps(SYNC)


def test_two_steps_in_flight() -> None:
    spans = [
        span("device", 0, 10, 0),
        span("planning", 1, 2, 1),
        span("launch", 2, 3, 1),
        span("wait", 3, 10, 0),
        span("update", 10, 11, 0),
        span("device", 10, 20, 1),
        span("planning", 11, 13, 2),
        span("launch", 13, 15, 2),
        span("wait", 15, 20, 1),
    ]
    assert device_idle_share(spans) == 0
    assert host_overlap(spans) == 1
    assert idle_gaps(spans) == []


def test_partial_overlap() -> None:
    spans = [span("device", 0, 10, 0), span("planning", 8, 12, 1), span("device", 12, 20, 1)]
    assert host_overlap(spans) == pytest.approx(2 / 4)
    assert device_idle_share(spans) == pytest.approx(2 / 20)


def test_time_without_work_does_not_count() -> None:
    """Nobody asks for 70 seconds; then planning takes 1 before the device starts."""
    spans = [
        span("wait", 0, 10, 0),
        span("device", 0, 10, 0),
        span("output", 10, 11, 0),
        span("planning", 80, 81, 1),
        span("device", 81, 90, 1),
        span("wait", 81, 90, 1),
    ]
    assert device_idle_share(spans) == pytest.approx(2 / 21)
    [gap] = idle_gaps(spans)
    assert gap.seconds == 2


def test_decode_and_prefill_apart() -> None:
    """A gap belongs to the step after it; the first step of a kind is not steady yet."""
    spans = [
        span("wait", 0, 100, 0),
        span("device", 0, 10, 0, tokens=50),
        span("device", 11, 20, 1, tokens=50),
        span("device", 25, 30, 2),
        span("device", 30, 34, 3),
        span("device", 36, 40, 4),
    ]
    assert idle_share_by_kind(spans) == {
        "prefill": pytest.approx(1 / 10),
        "decode": pytest.approx(2 / 10),
    }
    assert [gap.is_steady for gap in idle_gaps(spans)] == [True, False, True]
    assert idle_share_by_kind(spans[:2]) == {}


def test_gaps_inside_a_step_count_for_it() -> None:
    spans = [
        span("wait", 0, 100, 0),
        span("device", 0, 10, 0),
        span("device", 10, 12, 1),
        span("device", 13, 14, 1),
    ]
    assert idle_share_by_kind(spans) == {"decode": pytest.approx(1 / 4)}


def test_histogram() -> None:
    spans = [span("wait", 0, 100, 0)]
    for start, end in ((0, 1), (1 + 5e-6, 2), (2 + 15e-6, 3), (3 + 95e-6, 4), (4.5, 5)):
        spans.append(span("device", start, end, len(spans)))
    found = gap_histogram(idle_gaps(spans))
    assert list(found) == ["< 10 us", "< 100 us", "< 1 ms", "< 10 ms", ">= 10 ms"]
    # 5 us, 15 us, 95 us, 500 ms
    assert [count for count, _ in found.values()] == [1, 2, 0, 0, 1]
    assert found[">= 10 ms"][1] == pytest.approx(0.5)
    assert sum(seconds for _, seconds in found.values()) == pytest.approx(0.5 + 5e-6 + 11e-5)


def test_launches_that_overlap_are_not_counted_twice() -> None:
    spans = [span("wait", 0, 20), span("device", 0, 10), span("device", 5, 12)]
    spans.append(span("device", 15, 20, 1))
    assert device_idle_share(spans) == pytest.approx(3 / 20)


def test_no_device_times() -> None:
    with pytest.raises(ValueError, match="no span of the device"):
        device_idle_share([span("planning", 0, 1)])


def test_a_device_that_never_rests() -> None:
    assert device_idle_share([span("device", 5, 6)]) == 0
    assert host_overlap([span("device", 5, 6)]) is None, "nobody planned"
    assert device_idle_share([span("device", 5, 5)]) == 0
