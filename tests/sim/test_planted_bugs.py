"""Some of the bugs that tests/sim/plant_bugs.py plants, in CI: the checks can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from plant_bugs import PACKAGE, hunt
from planted_bugs import BUGS, PlantedBug


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.in_ci], ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug) -> None:
    """Within seconds, by a check and not by chance."""
    found = hunt(bug, max_steps=60_000)
    assert found.check is not None


def test_every_planted_bug_still_fits_the_source() -> None:
    """The engine changes; a bug that is not planted proves nothing."""
    unfit = [b.name for b in BUGS if (PACKAGE / b.file).read_text().count(b.old) != 1]
    assert unfit == []
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 36
