"""When requests are sent."""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

RampUp = Literal["linear", "exponential"]


class Rate(msgspec.Struct, frozen=True):
    """How requests arrive."""

    requests_per_second: float = math.inf
    """``inf``: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is a Poisson process, below it comes in
    bursts, above it is more even."""
    ramp_up: RampUp | None = None
    """The rate goes from ``ramp_up_start`` to ``ramp_up_end`` over the run."""
    ramp_up_start: float = 0.0
    ramp_up_end: float = 0.0


def send_times(count: int, rate: Rate, seed: int) -> list[float]:
    """Seconds after the start at which each of ``count`` requests is sent, in order.

    Without a ramp the times are stretched so that the last one is sent exactly when the rate says:
    a run of few requests has the offered load it was asked for.
    """
    if rate.ramp_up is None and math.isinf(rate.requests_per_second):
        return [0.0] * count
    source = random.Random(seed)
    times: list[float] = []
    now = 0.0
    for index in range(count):
        per_second = _rate_at(rate, index, count)
        mean_gap = 1.0 / per_second
        now += source.gammavariate(rate.burstiness, mean_gap / rate.burstiness)
        times.append(now)
    if rate.ramp_up is None and now > 0:
        stretch = count / rate.requests_per_second / now
        times = [time * stretch for time in times]
    return times


def _rate_at(rate: Rate, index: int, count: int) -> float:
    """Requests per second when request ``index`` of ``count`` is due."""
    if rate.ramp_up is None:
        return rate.requests_per_second
    progress = index / max(count - 1, 1)
    start, end = rate.ramp_up_start, rate.ramp_up_end
    if rate.ramp_up == "linear":
        return start + (end - start) * progress
    return start * math.pow(end / start, progress)
