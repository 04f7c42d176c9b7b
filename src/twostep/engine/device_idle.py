"""How well host and device overlap, from the spans of a timeline. Pure arithmetic.

"While there is work" is while the core's thread is at one of its stops: their spans follow each
other without a hole as long as requests run, and stop when the last one has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from twostep.engine.timeline import PlanCounts, StepSpan

Interval = tuple[float, float]
Kind = Literal["decode", "prefill"]

GAP_LIMITS = (1e-5, 1e-4, 1e-3, 1e-2)
"""Seconds: upper ends of the histogram's classes; the last class has none."""


class Gap(msgspec.Struct, frozen=True):
    """A time in which the device had nothing to do although there was work."""

    start: float
    end: float
    seconds: float
    """Of it while there was work."""
    before: PlanCounts
    """The step that the device waited for."""
    is_steady: bool
    """The step before it was of the same kind."""


def device_idle_share(spans: Iterable[StepSpan]) -> float:
    """Share of time, 0..1, in which the device was idle although there was work.

    Between the first and the last span of the device. Raises ValueError without such spans.
    """
    host, device = _split(spans)
    busy = _merge((span.start, span.end) for span in device)
    window = (busy[0][0], busy[-1][1])
    worked = _length(_clip(_merge([*host, *busy]), window))
    return 0.0 if worked == 0 else (worked - _length(busy)) / worked


def idle_share_by_kind(spans: Iterable[StepSpan]) -> dict[Kind, float]:
    """The same for steady decoding and steady prefill: steps that follow one of their own kind.

    A gap belongs to the step that the device waited for; gaps inside a step count as well. Kinds
    that never came twice in a row are left out.
    """
    spans = list(spans)
    _, device = _split(spans)
    busy: dict[Kind, float] = {}
    last: PlanCounts | None = None
    steady = False
    for span in device:
        if last is not None and span.plan.step != last.step:
            steady = kind_of(last) == kind_of(span.plan)
        if steady:
            kind = kind_of(span.plan)
            busy[kind] = busy.get(kind, 0.0) + span.end - span.start
        last = span.plan
    idle = dict.fromkeys(busy, 0.0)
    for gap in idle_gaps(spans):
        if gap.is_steady:
            idle[kind_of(gap.before)] += gap.seconds
    return {kind: idle[kind] / (idle[kind] + busy[kind]) for kind in busy if busy[kind] > 0}


def idle_gaps(spans: Iterable[StepSpan]) -> list[Gap]:
    """Where the device was idle although there was work, in order."""
    host, device = _split(spans)
    gaps: list[Gap] = []
    steady = False
    position = 0
    for before, after in zip(device, device[1:], strict=False):
        if before.plan.step != after.plan.step:
            steady = kind_of(before.plan) == kind_of(after.plan)
        while position < len(host) and host[position][1] <= before.end:
            position += 1
        seconds = _length(_clip(host, (before.end, after.start), position))
        if seconds > 0:
            gaps.append(Gap(before.end, after.start, seconds, after.plan, steady))
    return gaps


def gap_histogram(gaps: Iterable[Gap]) -> dict[str, tuple[int, float]]:
    """{class of length: (how many gaps, their seconds)}, for every class."""
    names = [*(f"< {_duration(limit)}" for limit in GAP_LIMITS), f">= {_duration(GAP_LIMITS[-1])}"]
    found = [(0, 0.0)] * len(names)
    for gap in gaps:
        index = sum(gap.seconds >= limit for limit in GAP_LIMITS)
        count, seconds = found[index]
        found[index] = (count + 1, seconds + gap.seconds)
    return dict(zip(names, found, strict=True))


def host_overlap(spans: Iterable[StepSpan]) -> float | None:
    """Share of planning and launching, 0..1, that happened while the device was busy.

    None if they took no time, as on a virtual clock. Raises ValueError without spans of the device.
    """
    spans = list(spans)
    _, device = _split(spans)
    busy = _merge((span.start, span.end) for span in device)
    total = hidden = 0.0
    position = 0
    for span in sorted(spans, key=lambda span: span.start):
        if span.lane not in ("planning", "launch"):
            continue
        while position < len(busy) and busy[position][1] <= span.start:
            position += 1
        total += span.end - span.start
        hidden += _length(_clip(busy, (span.start, span.end), position))
    return None if total == 0 else hidden / total


def kind_of(plan: PlanCounts) -> Kind:
    """``decode`` if every request of the step has one token."""
    return "decode" if plan.tokens == plan.requests else "prefill"


def _split(spans: Iterable[StepSpan]) -> tuple[list[Interval], list[StepSpan]]:
    """When the core's thread was at work, merged, and the device's spans, in order."""
    host: list[Interval] = []
    device: list[StepSpan] = []
    for span in spans:
        if span.lane == "device":
            device.append(span)
        else:
            host.append((span.start, span.end))
    if not device:
        raise ValueError("no span of the device: the executor does not tell when it ran")
    device.sort(key=lambda span: span.start)
    return _merge(host), device


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, without overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _clip(intervals: Sequence[Interval], window: Interval, first: int = 0) -> list[Interval]:
    """The parts of sorted intervals, from number ``first`` on, that lie in the window."""
    low, high = window
    inside: list[Interval] = []
    for index in range(first, len(intervals)):
        start, end = intervals[index]
        if start >= high:
            break
        if end > low:
            inside.append((max(start, low), min(end, high)))
    return inside


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.0f} ms"
