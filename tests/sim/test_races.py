"""Races that broke other engines, each as a script of its own, with a witness that it happened."""

from __future__ import annotations

import pytest

from twostep.contracts.plan import SchedulerOutput
from twostep.sim.case import Abort, Add, Case, CaseConfig, Event, Glitch, ResetCache
from twostep.sim.ghost_model import oracle
from twostep.sim.simulation import Simulation


class Watched(Simulation):
    """Keeps the plans, and when blocks were fenced."""

    def __init__(self, config: CaseConfig, events: tuple[Event, ...], steps: int) -> None:
        super().__init__(Case(config=config, events=events, steps=steps))
        self.plans: list[tuple[SchedulerOutput, int]] = []
        """With the number of steps in flight when each was made."""
        self.steps_with_fence = 0
        self.running_before: list[list[str]] = []
        check_plan = self.rules.scheduled

        def scheduled(plan: SchedulerOutput) -> None:
            self.plans.append((plan, len(self.core.batch_queue)))
            self.running_before.append(list(self.rules.running))
            check_plan(plan)

        self.rules.scheduled = scheduled  # type: ignore[method-assign]

    def _step(self) -> None:
        super()._step()
        self.steps_with_fence += bool(self.core.scheduler.kv_cache_manager._parked)


def run(config: CaseConfig, *events: Event, steps: int = 30) -> Watched:
    """Run to the end; every rule is checked after every step."""
    simulation = Watched(config, events, steps)
    simulation.run()
    return simulation


def test_abort_between_schedule_and_update() -> None:
    """Another thread aborts a request whose step was planned and has not returned."""
    seen = run(
        CaseConfig(),
        Add(step=0, request_id="a", length=5, max_tokens=20),
        Add(step=0, request_id="b", length=5, max_tokens=20),
        Abort(step=3, request_ids=("a",), via_queue=True),
    )
    assert seen.counts["aborted with a step in flight"] == 1
    assert seen.streams["a"].is_aborted
    assert seen.streams["b"].num_outputs == 20


def test_finish_at_n_while_n_plus_1_writes() -> None:
    """A stop token shows at step N; step N+1 still writes into the blocks that are freed."""
    prompt = Add(step=0, request_id="a", length=6)
    answer = oracle(prompt.prompt(), 12, ())
    stop = answer[2]
    assert stop not in answer[:2]
    seen = run(
        CaseConfig(num_blocks=4, block_size=4, max_num_seqs=1, caching=False),
        Add(step=0, request_id="a", length=6, max_tokens=6, stops=(stop,)),
        Add(step=0, request_id="b", length=1, tail=(9, 9, 9, 9, 9, 9, 9), max_tokens=2),
    )
    assert seen.streams["a"].num_outputs == 3
    assert seen.steps_with_fence >= 1
    assert sum("a" in plan.num_scheduled_tokens for plan, _ in seen.plans) == 4


def test_abort_before_the_first_allocation() -> None:
    """A waiting request leaves; the device never heard of it, and is not told."""
    seen = run(
        CaseConfig(max_num_seqs=1),
        Add(step=0, request_id="a", length=5, max_tokens=9),
        Add(step=0, request_id="b", length=5, max_tokens=9),
        Abort(step=2, request_ids=("b",)),
    )
    assert seen.streams["b"].is_aborted
    assert not any("b" in plan.finished_req_ids for plan, _ in seen.plans)


@pytest.mark.parametrize("via_queue", [False, True])
def test_late_completion_for_a_dead_id(via_queue: bool) -> None:
    """The id is alive again, as another request, when the dead one's result comes."""
    seen = run(
        CaseConfig(),
        Add(step=0, request_id="a", length=5, max_tokens=20),
        Abort(step=3, request_ids=("a",)),
        Abort(step=3, request_ids=("a",), via_queue=via_queue),
        Add(step=3 if not via_queue else 4, request_id="a", length=7, max_tokens=4),
    )
    assert seen.counts["aborted with a step in flight"] == 1
    assert seen.streams["a"].num_prompt == 7
    assert seen.streams["a"].num_outputs == 4


def test_preempt_and_resume_in_one_step_with_a_stale_result_on_its_way() -> None:
    """A cache reset: the next plan ends the row and starts it anew, the old step is in flight."""
    seen = run(
        CaseConfig(),
        Add(step=0, request_id="a", length=5, max_tokens=20),
        ResetCache(step=4, running=True),
    )
    (again,) = [
        in_flight
        for plan, in_flight in seen.plans
        if "a" in plan.preempted_req_ids
        and [new.request_id for new in plan.scheduled_new_reqs] == ["a"]
    ]
    assert again == 1
    assert seen.streams["a"].num_outputs == 20


def test_cache_reset_while_blocks_are_held() -> None:
    """It says no, and nothing happens: the next equal prompt still finds its prefix."""
    seen = run(
        CaseConfig(),
        Add(step=0, request_id="a", length=9, max_tokens=20),
        ResetCache(step=4),
        Add(step=5, request_id="b", length=9, max_tokens=2),
    )
    assert seen.counts["cache resets"] == 0
    assert seen.streams["b"].num_first_hits == 8


def test_cache_reset_while_a_suspect_runs_alone() -> None:
    """Its blocks are fenced behind the step that the reset threw away: it waits for them."""
    seen = run(
        CaseConfig(num_blocks=67, block_size=1, max_num_seqs=2, budget=16, max_model_len=57),
        Glitch(step=0, kind="result"),
        Add(step=0, request_id="a", length=1),
        Add(step=0, request_id="b", length=35),
        ResetCache(step=7, running=True),
    )
    assert seen.counts["steps failed by a glitch"] == 1
    assert any(in_flight and not plan.num_scheduled_tokens for plan, in_flight in seen.plans)
    assert seen.streams["b"].num_outputs == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_self_preemption_at_the_head_of_running(is_async: bool) -> None:
    """The least important request is the first to be planned, and finds no block."""
    seen = run(
        CaseConfig(
            is_async=is_async,
            num_blocks=9,
            block_size=2,
            policy="priority",
            caching=False,
            max_model_len=14,
        ),
        Add(step=0, request_id="head", length=4, max_tokens=10, priority=2),
        Add(step=1, request_id="important", length=4, max_tokens=10, priority=0),
    )
    heads = [
        plan
        for (plan, _), running in zip(seen.plans, seen.running_before, strict=True)
        if "head" in plan.preempted_req_ids and running[0] == "head"
    ]
    assert len(heads) >= 1
    assert all(plan.total_num_scheduled_tokens > 0 for plan in heads)
    assert seen.streams["head"].num_outputs == seen.streams["important"].num_outputs == 10


def test_a_request_larger_than_the_pool_is_refused() -> None:
    """At once, instead of waiting for ever; others are served."""
    seen = run(
        CaseConfig(num_blocks=5, block_size=4, max_model_len=40),
        Add(step=0, request_id="too large", length=16, max_tokens=1),
        Add(step=0, request_id="fits", length=15, max_tokens=1),
    )
    assert seen.counts["refused at admission"] == 1
    assert "too large" not in seen.streams
    assert seen.streams["fits"].num_outputs == 1
