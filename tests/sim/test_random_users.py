"""200 seeds of 500 steps in both modes: no rule is broken, and the runs look where bugs are."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from twostep.sim.campaign import Tally, Task, run_campaign, run_task
from twostep.sim.case import Add, Case, CaseConfig
from twostep.sim.report import markdown
from twostep.sim.simulation import run_case
from twostep.sim.sometimes import SOMETIMES
from twostep.sim.workload import make_case

SEEDS, STEPS, BLOCK = 200, 500, 10


@functools.cache
def block(first: int, is_async: bool) -> Tally:
    """Ten seeds; each block is run once."""
    seeds = tuple(range(first, first + BLOCK))
    return run_task(Task(seeds=seeds, modes=(is_async,), steps=STEPS))


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_rule_is_broken(is_async: bool, first: int) -> None:
    """The message of a failure names the rule; `twostep simulate check` shrinks it."""
    tally = block(first, is_async)
    assert [(f.case.seed, f.found) for f in tally.failures] == []
    assert tally.total_steps >= BLOCK * STEPS


@pytest.mark.timeout(180)
def test_every_event_that_must_happen_happens() -> None:
    """A simulator that never preempts proves nothing about preemption."""
    total = Tally()
    for first in range(0, SEEDS, BLOCK):
        total.add(block(first, False))
        total.add(block(first, True))
    assert {name for name in SOMETIMES if total.sometimes[name] < 3} == set()
    for name in ("finished: stop", "finished: length", "finished: abort", "finished: error"):
        assert total.counts[name] > 1000


def test_the_same_seed_gives_the_same_events_in_every_process() -> None:
    """I20: nothing depends on the hashes of strings, on addresses or on the clock."""
    code = (
        "from twostep.sim.simulation import run_case\n"
        "from twostep.sim.workload import make_case\n"
        "for seed in (3, 4):\n"
        "    print(run_case(make_case(seed, 120, is_async=seed == 4)).digest)\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    here = "".join(run_case(make_case(s, 120, is_async=s == 4)).digest + "\n" for s in (3, 4))
    assert digests == {here}


def test_another_seed_gives_other_events() -> None:
    """The digest is not a constant."""
    assert run_case(make_case(1, 50, is_async=True)).digest != (
        run_case(make_case(2, 50, is_async=True)).digest
    )


def test_sums_do_not_depend_on_the_number_of_processes() -> None:
    """Workers only share out the seeds."""
    alone = run_campaign(range(8), steps=40, modes=(False, True), jobs=1)
    seen: list[int] = []
    shared = run_campaign(range(8), steps=40, modes=(False, True), jobs=2, on_progress=seen.append)
    assert seen[-1] == 8
    for tally in (alone, shared):
        tally.seconds = tally.cpu_seconds = 0.0
    assert shared == alone


def test_a_replayed_case_is_the_same_run() -> None:
    """What is saved of a run is all there is to it."""
    case = make_case(7, 100, is_async=True)
    assert run_case(case).digest == run_case(make_case(7, 100, is_async=True)).digest
    other = Case(config=case.config, events=case.events[:-1], steps=case.steps)
    assert run_case(other).digest != run_case(case).digest


def test_an_unknown_configuration_is_refused_with_a_reason() -> None:
    """A case that no engine can be built for is not a violation."""
    config = CaseConfig(num_blocks=1)
    with pytest.raises(ValueError, match="blocks"):
        run_case(Case(config=config, events=(Add(step=0, request_id="a", length=1),), steps=1))


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_keeps_what_was_found(jobs: int) -> None:
    """A long campaign that is stopped by hand tells of the seeds that it did."""

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    tally = run_campaign(range(3000), steps=400, modes=(False,), jobs=jobs, on_progress=stop)
    assert tally.was_interrupted
    assert 0 < tally.seeds < 3000
    assert tally.total_steps >= 400 * tally.seeds
    assert "stopped by hand" in markdown(tally, command="x")
