"""Medians, spread and ratios over rounds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of one figure over the rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times better than a peer ours is."""

    variant: str
    """The peer's setting that counts: the one with the better median."""
    per_round: list[float]
    """The two of a round run within a minute, while the machine's speed drifts over hours."""

    @property
    def median(self) -> float:
        """Of the rounds' ratios."""
        return statistics.median(self.per_round)


def best_variant(values: Mapping[str, Sequence[float]], *, lower_is_better: bool = False) -> str:
    """The name with the better median; the first of equals."""
    choose = min if lower_is_better else max
    return choose(values, key=lambda name: statistics.median(values[name]))


def ratio(
    ours: Mapping[int, float],
    peer: Mapping[str, Mapping[int, float]],
    *,
    lower_is_better: bool = False,
) -> Ratio | None:
    """Ours against the better of a peer's variants, round by round; above 1 is better.

    ``ours`` and each variant map the round to the value. Rounds that one of the two lacks are left
    out; None if no round is left.
    """
    measured = {name: list(rounds.values()) for name, rounds in peer.items() if rounds}
    if not measured:
        return None
    variant = best_variant(measured, lower_is_better=lower_is_better)
    theirs = peer[variant]
    per_round = [
        theirs[number] / ours[number] if lower_is_better else ours[number] / theirs[number]
        for number in sorted(ours)
        if number in theirs
    ]
    return Ratio(variant, per_round) if per_round else None
