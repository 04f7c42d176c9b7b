"""A histogram for one thread that takes many values of a step at once.

prometheus-client's own takes a lock for every value, and a step has one for each running request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate


class Histogram:
    """Counts values by bucket; ``family`` tells them when somebody scrapes."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self.count = 0
        """Values so far."""
        self.sum = 0.0
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        """By bucket, the last one without a bound."""

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value
        self.count += 1

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several."""
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.sum += value
            self.count += 1

    def cumulative(self) -> list[tuple[float | str, int]]:
        """(upper bound, values up to it), the last one without a bound."""
        return [*zip(map(float, self._bounds), self._totals(), strict=False), ("+Inf", self.count)]

    def _totals(self) -> Iterator[int]:
        return accumulate(self._counts)
