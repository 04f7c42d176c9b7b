"""Many seeds, on all cores, and what they add up to."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import msgspec

from twostep.sim.case import Case
from twostep.sim.simulation import Found, Outcome, run_case
from twostep.sim.sometimes import SOMETIMES
from twostep.sim.workload import make_case

TWICE_EVERY = 50
"""One seed in so many runs twice, and must give the same events."""

_STEPS_PER_TASK = 4000
"""A second or less: how long a worker is deaf to Ctrl-C."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that broke a rule."""

    case: Case
    found: Found


class Tally(msgspec.Struct, kw_only=True):
    """Sums over seeds."""

    seeds: int = 0
    """Runs, a seed in two modes counted twice."""
    steps: dict[str, int] = msgspec.field(default_factory=dict)
    """Calls of the step function, by mode."""
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    sometimes: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(SOMETIMES, 0))
    cpu_seconds: float = 0.0
    """Of all workers, making up the cases included."""
    seconds: float = 0.0
    """On the clock."""
    failures: list[Failure] = msgspec.field(default_factory=list)
    was_interrupted: bool = False
    """Stopped by hand before the last seed."""

    @property
    def total_steps(self) -> int:
        """Steps of all modes."""
        return sum(self.steps.values())

    @property
    def microseconds_per_step(self) -> float:
        """CPU time, all checks on."""
        return 1e6 * self.cpu_seconds / max(1, self.total_steps)

    def add(self, other: Tally) -> None:
        """Add what another worker found."""
        self.seeds += other.seeds
        self.steps = dict(Counter(self.steps) + Counter(other.steps))
        self.counts = dict(Counter(self.counts) + Counter(other.counts))
        for name, hits in other.sometimes.items():
            self.sometimes[name] += hits
        self.cpu_seconds += other.cpu_seconds
        self.failures += other.failures

    def add_outcome(self, outcome: Outcome) -> None:
        """Add one run."""
        mode = mode_name(outcome.is_async)
        self.seeds += 1
        self.steps[mode] = self.steps.get(mode, 0) + outcome.steps
        self.counts = dict(Counter(self.counts) + Counter(outcome.counts))
        for name, hits in outcome.sometimes.items():
            self.sometimes[name] += hits


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker does at a time."""

    seeds: tuple[int, ...]
    modes: tuple[bool, ...]
    """Values of ``is_async``."""
    steps: int


def mode_name(is_async: bool) -> str:
    """As users write it."""
    return "async" if is_async else "sync"


def run_campaign(
    seeds: range,
    *,
    steps: int,
    modes: Sequence[bool],
    jobs: int,
    max_failures: int = 1,
    on_progress: Callable[[int], None] = lambda num_seeds: None,
) -> Tally:
    """Run all seeds; ends early after ``max_failures``. ``on_progress``: seeds done so far.

    The sums do not depend on ``jobs``. An interrupt ends it as well, with what was found so far: a
    long run is worth something at any time.
    """
    start = time.perf_counter()
    tally = Tally()
    done = 0
    try:
        for task, found in _results(_tasks(seeds, steps, tuple(modes)), jobs):
            tally.add(found)
            done += len(task.seeds)
            on_progress(done)
            if len(tally.failures) >= max_failures:
                break
    except KeyboardInterrupt:
        tally.was_interrupted = True
    tally.seconds = time.perf_counter() - start
    return tally


def run_task(task: Task) -> Tally:
    """Run some seeds, each up to its first failure."""
    start = time.process_time()
    tally = Tally()
    gc.disable()  # cases leave no circles behind that are worth looking for after every step
    for seed in task.seeds:
        for is_async in task.modes:
            case = make_case(seed, task.steps, is_async=is_async)
            outcome = run_case(case)
            tally.add_outcome(outcome)
            found = outcome.violation
            if (
                found is None
                and seed % TWICE_EVERY == 0
                and run_case(case).digest != (outcome.digest)
            ):
                found = Found(check="I20", message="two runs differ", step=outcome.steps)
            if found is not None:
                tally.failures.append(Failure(case=case, found=found))
    gc.enable()
    gc.collect()
    tally.cpu_seconds = time.process_time() - start
    return tally


def _tasks(seeds: range, steps: int, modes: tuple[bool, ...]) -> list[Task]:
    size = max(1, _STEPS_PER_TASK // (steps * len(modes)))
    return [
        Task(seeds=tuple(seeds[i : i + size]), modes=modes, steps=steps)
        for i in range(0, len(seeds), size)
    ]


def _results(tasks: list[Task], jobs: int) -> Iterator[tuple[Task, Tally]]:
    """Tasks with their results, as they come."""
    if jobs == 1:
        for task in tasks:
            yield task, run_task(task)
        return
    pool = ProcessPoolExecutor(
        min(jobs, len(tasks)), multiprocessing.get_context("spawn"), initializer=_ignore_interrupts
    )
    waiting: dict[Future[Tally], Task] = {}
    remaining = iter(tasks)
    try:
        while True:
            for task in remaining:
                waiting[pool.submit(run_task, task)] = task
                if len(waiting) >= 2 * jobs:
                    break
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C is the parent's: it lets the workers finish what they do, and nothing more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
