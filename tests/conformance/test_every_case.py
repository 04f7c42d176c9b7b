"""Every case of the specification is a test with its number, or names what brings it."""

from __future__ import annotations

import pathlib
import re

NUM_CASES = 70
SERVER, SPECULATIVE, DISTRIBUTED = "issue D: the server", "drafters", "several processes"
LATER = {
    13: f"{DISTRIBUTED}: one queue write for each call, one reply",
    17: f"{SERVER}: shutdown with a timeout",
    19: f"{SERVER}: utility calls",
    52: f"{SPECULATIVE}: greedy rejection",
    53: f"{SPECULATIVE}: random rejection",
    55: f"{SPECULATIVE}: n-gram lookup",
    62: f"{SERVER}: disconnected clients",
    65: f"{DISTRIBUTED}: load balancing",
    66: f"{DISTRIBUTED}: data-parallel waves",
    67: f"{DISTRIBUTED}: shared-memory queue",
    68: f"{DISTRIBUTED}: output rank, failure replies",
    69: f"{SERVER}: /metrics",
}
"""Cases of features that are not built, and which piece of work brings them."""


def numbered_tests() -> set[int]:
    """Case numbers in the names of tests; ``test_case_28_and_30_...`` counts for both."""
    found: set[int] = set()
    for path in pathlib.Path(__file__).parents[1].rglob("test_*.py"):
        for name in re.findall(r"def test_case_((?:\d+_(?:and_)?)+)", path.read_text()):
            found.update(int(number) for number in re.findall(r"\d+", name))
    return found


def test_no_case_is_missing() -> None:
    """All 70, each in exactly one of the two places."""
    tested = numbered_tests()
    assert tested | LATER.keys() == set(range(1, NUM_CASES + 1))
    assert tested & LATER.keys() == set()
