"""Sampling that waits for a grammar's token: the order of calls, and what may come in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import pytest
from planning_helpers import by_id, check, check_drained, make_configs, make_engine_request

from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import FinishReason
from twostep.contracts.sampling import StructuredOutputsParams
from twostep.engine.core import EngineCore
from twostep.sim.clock import VirtualClock
from twostep.sim.ghost_grammar import GhostGrammarFuture
from twostep.sim.recording_ghost import RecordingGhost

Tokens = dict[str, list[int]]
NUM_TOKENS = 6


class Interrupt(BaseException):
    """Ctrl-C."""


class Compiler:
    """Every structured request gets the same ghost grammar at once."""

    def compile(
        self, params: StructuredOutputsParams, end_token_ids: Collection[int]
    ) -> GhostGrammarFuture:
        """Half of all tokens are allowed."""
        return GhostGrammarFuture(VirtualClock(), 0.0, 2)


def make_core(is_async: bool) -> tuple[EngineCore, RecordingGhost]:
    """A core with a structured request S and a plain one P."""
    scheduler_config, cache_config = make_configs(async_scheduling=is_async)
    ghost = RecordingGhost(cache_config.block_size)
    core = EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=ghost,
        clock=VirtualClock(),
        grammar_compiler=Compiler(),
    )
    core.add_request(make_engine_request("S", 5, NUM_TOKENS, structured=True))
    core.add_request(make_engine_request("P", 5, NUM_TOKENS))
    return core, ghost


def drain(core: EngineCore) -> tuple[Tokens, int]:
    """Tokens by request, and how often Ctrl-C came out."""
    tokens: Tokens = {"S": [], "P": []}
    interrupts = 0
    while core.has_work():
        try:
            outputs, _ = core.step_fn()
        except Interrupt:
            interrupts += 1
            continue
        check(core.scheduler)
        for name, news in by_id(outputs).items():
            tokens[name] += news.new_token_ids
            assert news.finish_reason in (None, FinishReason.LENGTH), news.stop_reason
    check_drained(core.scheduler)
    return tokens, interrupts


@pytest.fixture(scope="module")
def alone() -> Tokens:
    """What one step at a time gives."""
    core, _ = make_core(is_async=False)
    tokens, _ = drain(core)
    assert list(map(len, tokens.values())) == [NUM_TOKENS, NUM_TOKENS]
    return tokens


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are expected here."""
    caplog.set_level(logging.CRITICAL)


def test_the_forward_pass_is_queued_before_the_result_is_taken(alone: Tokens) -> None:
    """And sampling behind it: everybody has a token in every step."""
    core, ghost = make_core(is_async=True)
    assert core.step_fn() == (None, True)
    ghost.calls.clear()
    ghost.fail_result = lambda plan: ghost.calls.append(f"sampled {plan.step_id}")
    delivered = ghost.delivered

    def note(step_id: int) -> None:
        ghost.calls.append(f"took {step_id}")
        delivered(step_id)

    ghost.delivered = note
    outputs, executed = core.step_fn()
    assert executed
    assert set(by_id(outputs)) == {"S", "P"}
    more, _ = core.step_fn()
    wanted = ["execute_model", "took 0", "sample_tokens", "sampled 1", "execute_model", "took 1"]
    assert ghost.calls == wanted
    ghost.fail_result = None
    tokens, _ = drain(core)
    for news in (more, outputs):
        tokens = {name: by_id(news)[name].new_token_ids + tokens[name] for name in tokens}
    assert tokens == alone
    sampling_plans = [plan for plan in ghost.plans if plan.num_scheduled_tokens]
    assert len(sampling_plans) == NUM_TOKENS


def once(error: BaseException, at_step: int) -> Callable[[SchedulerOutput], BaseException | None]:
    """One failure."""
    errors = [error]
    return lambda plan: errors.pop() if errors and plan.step_id == at_step else None


@pytest.mark.parametrize("kind", ["fail_execute", "fail_sample", "fail_result"])
@pytest.mark.parametrize("at_step", [0, 1, 2, NUM_TOKENS - 1])
def test_a_failure_changes_no_text(alone: Tokens, kind: str, at_step: int) -> None:
    core, ghost = make_core(is_async=True)
    setattr(ghost, kind, once(ValueError("glitch"), at_step))
    assert drain(core)[0] == alone


@pytest.mark.parametrize("kind", ["fail_execute", "fail_sample", "fail_result"])
@pytest.mark.parametrize("at_step", [0, 1, 2, NUM_TOKENS - 1])
def test_an_interrupt_loses_no_news(alone: Tokens, kind: str, at_step: int) -> None:
    """One that hits late sampling comes between two calls, so to say."""
    core, ghost = make_core(is_async=True)
    setattr(ghost, kind, once(Interrupt(), at_step))
    assert drain(core) == (alone, 1)


def test_an_interrupt_right_before_late_sampling(alone: Tokens) -> None:
    """The step before was processed and sampling was not queued: that comes first next time."""
    core, ghost = make_core(is_async=True)
    core.step_fn()
    news = []

    class Watcher:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args: None

        def updated(self, plan: SchedulerOutput, outputs: object) -> None:
            news.append(outputs)
            core.observer = None
            raise Interrupt

    core.observer = Watcher()
    with pytest.raises(Interrupt):
        core.step_fn()
    ghost.calls.clear()
    tokens, _ = drain(core)
    assert ghost.calls[:2] == ["sample_tokens", "execute_model"]
    first = by_id(news[0])
    assert {name: first[name].new_token_ids + tokens[name] for name in tokens} == alone


def test_an_abort_in_between(alone: Tokens) -> None:
    """Seen before the result is processed: the request needs no mask any more."""
    core, _ = make_core(is_async=True)
    core.step_fn()
    core.aborts_queue.put(["S"])
    core.step_fn()
    core.step_fn()
    tokens, _ = drain(core)
    assert tokens["S"] == []
