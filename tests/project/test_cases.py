"""docs/cases.md names the sixty cases and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (B\d\d) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/cases.md").read_text(), re.MULTILINE
)


def test_every_case_is_there_once_and_has_a_test() -> None:
    assert [name for name, _, _ in ROWS] == [f"B{number:02}" for number in range(1, 61)]
    for name, what, tests in ROWS:
        assert what.strip(), name
        assert "::test_" in tests, name


def test_every_test_that_is_named_exists() -> None:
    for name, _, tests in ROWS:
        for path, function in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests):
            source = (ROOT / path).read_text()
            assert re.search(rf"^def {function}\(", source, re.MULTILINE), (name, path, function)


def test_tests_that_carry_a_number_are_named() -> None:
    """So that the table stays what it says when a test is added or renamed."""
    told = {name: tests for name, _, tests in ROWS}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            for number in re.findall(r"_b(\d\d)(?=_|$)", function):
                assert f"`{path.relative_to(ROOT)}::{function}`" in told[f"B{number}"], function
