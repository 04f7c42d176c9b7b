"""A turn begins on a whole machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
from benchmarks import machine


def work_done(monkeypatch: pytest.MonkeyPatch, stolen: list[float]) -> list[float]:
    """How often a settler lets two CPUs work, if as much has been stolen in all by each look."""
    looks = iter(stolen)
    turns: list[float] = []
    monkeypatch.setattr(machine, "stolen_seconds", lambda: next(looks))
    monkeypatch.setattr(machine, "work", turns.append)
    machine.Settler(2).settle()
    return turns


def test_a_turn_waits_until_the_host_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    once = [machine.SETTLE_SECONDS] * 2
    assert work_done(monkeypatch, [5.0, 5.01]) == once
    assert work_done(monkeypatch, [5.0, 5.3, 5.3, 5.35, 5.35, 5.35]) == once * 3


def test_a_host_that_always_takes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [float(i) for i in range(2 * machine.SETTLE_TRIES)]
    assert len(work_done(monkeypatch, looks)) == 2 * machine.SETTLE_TRIES


def test_memory_of_an_ended_program_goes_back_before_the_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(machine.time, "sleep", waits.append)
    monkeypatch.setattr(machine, "stolen_seconds", lambda: 0.0)
    monkeypatch.setattr(machine, "work", lambda seconds: None)
    settler = machine.Settler(2)
    settler.settle()
    assert waits == []
    subprocess.run([sys.executable, "-c", ""], check=True)
    settler.settle()
    assert waits == [machine.HANDED_BACK_SECONDS]
    settler.settle()
    assert waits == [machine.HANDED_BACK_SECONDS], "once for each end"


def test_stolen_time_counts_up() -> None:
    first = machine.stolen_seconds()
    assert 0 <= first <= machine.stolen_seconds()
