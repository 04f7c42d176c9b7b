"""A step that fails takes its culprit and nobody else."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from planning_helpers import (
    FakeClock,
    by_id,
    check,
    check_drained,
    make_configs,
    make_engine_request,
)

from twostep.contracts.errors import EngineDeadError
from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import FinishReason
from twostep.engine.core import EngineCore
from twostep.sim.ghost_model import oracle
from twostep.sim.recording_ghost import RecordingGhost

PROMPTS = {"a": [1, 2, 3], "b": [4, 5], "c": list(range(30))}
Failure = Callable[[SchedulerOutput], Exception | None]


def make_core(is_async: bool = True, **config: object) -> tuple[EngineCore, RecordingGhost]:
    """A core on a ghost with three requests."""
    scheduler_config, cache_config = make_configs(
        async_scheduling=is_async, num_blocks=50, max_model_len=200, **config
    )  # type: ignore[arg-type]
    ghost = RecordingGhost(cache_config.block_size)
    core = EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=ghost,
        clock=FakeClock(),
    )
    for name, prompt in PROMPTS.items():
        core.add_request(make_engine_request(name, prompt, 8))
    return core, ghost


def drain(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    """Run to the end; tokens and ends by request."""
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    ends: dict[str, FinishReason] = {}
    while core.has_work():
        outputs, _ = core.step_fn()
        check(core.scheduler)
        for name, news in by_id(outputs).items():
            assert name not in ends
            tokens[name] += news.new_token_ids
            if news.finish_reason is not None:
                ends[name] = news.finish_reason
    check_drained(core.scheduler)
    return tokens, ends


def fails_with(name: str, at_step: int = 0) -> Failure:
    """Every plan that contains this request fails, from some step on."""

    def failure(plan: SchedulerOutput) -> Exception | None:
        if name in plan.num_scheduled_tokens and plan.step_id >= at_step:
            return ValueError("bad request")
        return None

    return failure


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are expected here."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("kind", ["fail_execute", "fail_sample", "fail_result"])
@pytest.mark.parametrize("at_step", [0, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_culprit_is_found(is_async: bool, at_step: int, kind: str) -> None:
    """Wherever the failure shows: the others' tokens are those they have alone."""
    core, ghost = make_core(is_async)
    setattr(ghost, kind, fails_with("b", at_step))
    tokens, ends = drain(core)
    assert ends == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR, "c": FinishReason.LENGTH}
    for name in ("a", "c"):
        assert tokens[name] == oracle(PROMPTS[name], 8, set())
    assert tokens["b"] == oracle(PROMPTS["b"], 8, set())[: len(tokens["b"])]
    assert (ghost.num_resets > 0) == (kind != "fail_result")


def test_a_failure_without_a_culprit_is_forgiven() -> None:
    """It happened once and does not repeat: everybody goes on."""
    core, ghost = make_core()
    ghost.fail_result = lambda plan: OSError("glitch") if plan.step_id == 2 else None
    tokens, ends = drain(core)
    assert set(ends.values()) == {FinishReason.LENGTH}
    for name, prompt in PROMPTS.items():
        assert tokens[name] == oracle(prompt, 8, set())
    assert sum(len(p.num_scheduled_tokens) == 1 for p in ghost.plans) >= 3
    # One token each proved them innocent; then they ran together again.
    assert max(len(p.num_scheduled_tokens) for p in ghost.plans if p.step_id > 4) == 3


def test_content_of_a_failed_step_is_not_found_later() -> None:
    """Its blocks were published when it was planned, and never filled."""
    core, ghost = make_core()
    ghost.fail_execute = fails_with("c")
    drain(core)
    ghost.fail_execute = lambda plan: None
    core.add_request(make_engine_request("c", PROMPTS["c"], 8))
    tokens, ends = drain(core)
    assert ghost.plans[-1].scheduled_new_reqs == []
    assert tokens["c"] == oracle(PROMPTS["c"], 8, set())
    assert ends == {"c": FinishReason.LENGTH}


def test_suspects_that_are_aborted_are_forgotten() -> None:
    """No one is left to probe."""
    core, ghost = make_core()
    ghost.fail_execute = fails_with("b")
    core.step_fn()
    core.step_fn()
    assert core.scheduler.suspects
    core.abort_requests(list(PROMPTS))
    assert not core.scheduler.suspects
    _, ends = drain(core)
    assert ends == {}


def test_members_that_ended_before_the_failure_are_not_blamed() -> None:
    """An aborted request cannot be the culprit any more."""
    core, ghost = make_core()
    core.step_fn()
    core.abort_requests(["a", "b", "c"])
    ghost.in_flight.clear()
    core.batch_queue[0][0].error = RuntimeError("late")  # type: ignore[union-attr]
    tokens, ends = drain(core)
    assert ends == {}
    assert tokens == {"a": [], "b": [], "c": []}


def test_a_later_step_that_fails_too_is_only_noted() -> None:
    """Both steps in flight fail: the older one decides."""
    core, ghost = make_core()
    ghost.fail_result = lambda plan: RuntimeError("x") if plan.step_id in (1, 2) else None
    tokens, ends = drain(core)
    assert set(ends.values()) == {FinishReason.LENGTH}
    for name, prompt in PROMPTS.items():
        assert tokens[name] == oracle(prompt, 8, set())


def test_launch_failure_behind_a_failing_step() -> None:
    """Step 1 cannot be queued and step 0 fails as well."""
    core, ghost = make_core()
    ghost.fail_result = lambda plan: RuntimeError("x") if plan.step_id == 0 else None
    ghost.fail_execute = lambda plan: RuntimeError("y") if plan.step_id == 1 else None
    tokens, ends = drain(core)
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert tokens["a"] == oracle(PROMPTS["a"], 8, set())


def test_nothing_is_planned_on_top_of_a_failed_launch() -> None:
    """The step before it is finished first, then the failure is dealt with."""
    core, ghost = make_core()
    core.step_fn()
    ghost.fail_sample = lambda plan: RuntimeError("y") if plan.step_id == 1 else None
    core.step_fn()
    assert len(ghost.plans) == 2
    core.step_fn()
    assert len(ghost.plans) == 2
    drain(core)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_broken_executor_ends_everybody_and_then_the_engine(is_async: bool) -> None:
    """Each request fails alone; when there is none left to blame, the core stops."""
    core, ghost = make_core(is_async)
    ghost.fail_execute = lambda plan: RuntimeError("device lost")
    ends = {}
    while len(ends) < len(PROMPTS):
        outputs, _ = core.step_fn()
        ends |= {name: news.finish_reason for name, news in by_id(outputs).items()}
    with pytest.raises(EngineDeadError, match="RuntimeError: device lost"):
        core.step_fn()
    assert ends == dict.fromkeys(PROMPTS, FinishReason.ERROR)
    with pytest.raises(EngineDeadError):
        core.step_fn()
    with pytest.raises(EngineDeadError):
        core.add_request(make_engine_request("d"))


def test_ids_of_a_plan_that_was_not_queued_are_told_again() -> None:
    """The runner never heard that R2 lost its row; it must, before R2 comes back as new."""
    core, ghost = make_core(is_async=False)
    core.abort_requests(list(PROMPTS))
    pool = core.scheduler.kv_cache_manager.pool
    taken = pool.get_new_blocks(pool.num_free_blocks - 10)
    core.add_request(make_engine_request("R1", 64, 3))
    core.add_request(make_engine_request("R2", 80, 3))
    core.step_fn()
    ghost.fail_execute = fails_with("R1")
    core.step_fn()
    assert ghost.plans[-1].preempted_req_ids == {"R2"}
    ghost.fail_execute = lambda plan: None
    core.step_fn()
    assert ghost.plans[-1].preempted_req_ids == {"R1", "R2"}
    assert ghost.plans[-1].finished_req_ids == {"R1"}
    assert [new.request_id for new in ghost.plans[-1].scheduled_new_reqs] == ["R2"]
    pool.free_blocks(taken)
    check(core.scheduler)


class Interrupt(BaseException):
    """Ctrl-C."""


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupted_wait_loses_nothing(is_async: bool) -> None:
    """Ctrl-C during the wait: the step stays queued, its result is taken next time."""
    core, ghost = make_core(is_async)
    core.step_fn()
    interrupted = []

    def interrupt_once(plan: SchedulerOutput) -> Exception | None:
        if not interrupted:
            interrupted.append(plan.step_id)
            return Interrupt()  # type: ignore[return-value]
        return None

    ghost.fail_result = interrupt_once
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    if not is_async:  # the first step's tokens were delivered above
        tokens = {name: oracle(prompt, 1, set()) for name, prompt in PROMPTS.items()}
    while core.has_work():
        try:
            outputs, _ = core.step_fn()
        except Interrupt:
            core.batch_queue[-1][0].error = None  # type: ignore[union-attr]
            continue
        for name, news in by_id(outputs).items():
            tokens[name] += news.new_token_ids
    assert interrupted
    assert tokens == {name: oracle(prompt, 8, set()) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupted_launch_blames_nobody(is_async: bool) -> None:
    """Ctrl-C while a step is queued: the step is planned again."""
    core, ghost = make_core(is_async)
    interrupts = [Interrupt()]

    def interrupt_once(plan: SchedulerOutput) -> Exception | None:
        return interrupts.pop() if interrupts and plan.step_id == 1 else None  # type: ignore[return-value]

    ghost.fail_sample = interrupt_once
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    num_raised = 0
    while core.has_work():
        try:
            outputs, _ = core.step_fn()
        except Interrupt:
            num_raised += 1
            continue
        for name, news in by_id(outputs).items():
            tokens[name] += news.new_token_ids
            assert news.finish_reason is not FinishReason.ERROR
    assert num_raised == 1
    assert tokens == {name: oracle(prompt, 8, set()) for name, prompt in PROMPTS.items()}


def test_an_interrupt_while_a_failure_is_cleaned_up_loses_nothing() -> None:
    """Ctrl-C while the core waits for the step behind a failed one; the error is told only once."""
    core, ghost = make_core()
    seen: list[int] = []

    def fail(plan: SchedulerOutput) -> BaseException | None:
        if plan.step_id in (1, 2) and plan.step_id not in seen:
            seen.append(plan.step_id)
            return ValueError("kernel") if plan.step_id == 1 else Interrupt()
        return None

    ghost.fail_result = fail  # type: ignore[assignment]
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    num_interrupts = 0
    while core.has_work():
        try:
            outputs, _ = core.step_fn()
        except Interrupt:
            num_interrupts += 1
            newest, _ = core.batch_queue[0]
            newest.error = None  # type: ignore[misc, union-attr]  # it was a signal, not the step
            continue
        for name, news in by_id(outputs).items():
            tokens[name] += news.new_token_ids
            assert news.finish_reason is not FinishReason.ERROR
    assert seen == [1, 2]
    assert num_interrupts == 1
    assert tokens == {name: oracle(prompt, 8, set()) for name, prompt in PROMPTS.items()}
    check_drained(core.scheduler)
