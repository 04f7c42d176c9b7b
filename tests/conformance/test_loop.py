"""Cases 12, 14-16, 18: the engine core's loop."""

from __future__ import annotations

import logging

import pytest
from planning_helpers import FakeClock, by_id, check_drained, make_configs, make_engine_request

from twostep.contracts.request import FinishReason
from twostep.engine.core import EngineCore
from twostep.sim.ghost_model import oracle
from twostep.sim.recording_ghost import RecordingGhost


def make_core(**config: object) -> tuple[EngineCore, RecordingGhost]:
    """An engine core on a ghost device."""
    scheduler_config, cache_config = make_configs(**config)  # type: ignore[arg-type]
    ghost = RecordingGhost(cache_config.block_size)
    core = EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=ghost,
        clock=FakeClock(),
    )
    return core, ghost


def test_case_12_exception_takes_only_its_culprit(caplog: pytest.LogCaptureFixture) -> None:
    """The seed's engine dies here. Ours dumps the plan, ends the culprit, and goes on."""
    core, ghost = make_core()
    prompts = {name: [i + 1, 2, 3] for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        core.add_request(make_engine_request(name, prompt, 6))
    ghost.fail_execute = lambda plan: (
        RuntimeError("kernel") if "b" in plan.num_scheduled_tokens and plan.step_id > 2 else None
    )
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    ends: dict[str, FinishReason] = {}
    with caplog.at_level(logging.ERROR):
        while core.has_work():
            outputs, _ = core.step_fn()
            for name, news in by_id(outputs).items():
                assert name not in ends
                tokens[name] += news.new_token_ids
                if news.finish_reason is not None:
                    ends[name] = news.finish_reason
                    if name == "b":
                        assert news.stop_reason == "RuntimeError: kernel"
    assert ends == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR, "c": FinishReason.LENGTH}
    for name in "ac":
        assert tokens[name] == oracle(prompts[name], 6, set())
    assert tokens["b"] == oracle(prompts["b"], 6, set())[: len(tokens["b"])]
    assert "tokens {'a': 1, 'b': 1, 'c': 1}" in caplog.text
    check_drained(core.scheduler)


def test_case_14_batch_queue_fills_first() -> None:
    """None, out(k), out(k+1)."""
    core, ghost = make_core()
    core.add_request(make_engine_request("a", 5, 100))
    news = [core.step_fn() for _ in range(3)]
    assert news[0] == (None, True)
    assert [by_id(outputs)["a"].new_token_ids for outputs, _ in news[1:]] == [
        oracle(make_engine_request("a", 5).prompt_token_ids, 2, set())[i : i + 1] for i in (0, 1)
    ]
    assert len(ghost.plans) == 3
    assert len(core.batch_queue) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_case_15_the_last_finish_travels_in_an_empty_plan(is_async: bool) -> None:
    """0 tokens and the finished id; then the loop has nothing to do."""
    core, ghost = make_core(async_scheduling=is_async)
    core.add_request(make_engine_request("a", 5, 2))
    while core.has_unfinished_requests():
        core.step_fn()
    assert core.has_work()
    outputs, executed = core.step_fn()
    assert not executed
    assert by_id(outputs) == {}
    assert ghost.plans[-1].total_num_scheduled_tokens == 0
    assert ghost.plans[-1].finished_req_ids == {"a"}
    assert not core.scheduler.has_requests()
    assert not core.has_work()
    assert core.step_fn() == (None, False)
    assert not ghost.rows


def test_case_16_aborts_are_idempotent() -> None:
    """Unknown ids and second aborts change nothing; the finished id travels once."""
    core, ghost = make_core()
    core.abort_requests(["never"])
    assert not core.has_work()
    core.add_request(make_engine_request("a", 5, 100))
    core.step_fn()
    assert core.scheduler.finish_requests(["a", "a", "x"], ended := _aborted()) == [("a", 0)]
    assert core.scheduler.finish_requests(["a"], ended) == []
    while core.has_work():
        outputs, _ = core.step_fn()
        assert by_id(outputs) == {}
    assert [p.finished_req_ids for p in ghost.plans if p.finished_req_ids] == [{"a"}]


def test_case_16_abort_before_the_first_plan_is_no_news_for_the_executor() -> None:
    """The executor never heard of it, so nothing is sent."""
    core, ghost = make_core()
    core.add_request(make_engine_request("a", 5, 100))
    core.abort_requests(["a"])
    assert not core.has_work()
    assert ghost.plans == []


def _aborted():  # type: ignore[no-untyped-def]
    from twostep.scheduler.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


@pytest.mark.parametrize("is_async", [False, True])
def test_case_18_pause_keep_freezes_everything(is_async: bool) -> None:
    """Plans of 0 tokens while paused; afterwards the same requests go on from their counters."""
    core, ghost = make_core(async_scheduling=is_async)
    for name in "ab":
        core.add_request(make_engine_request(name, 5, 20))
    tokens: dict[str, list[int]] = {"a": [], "b": []}

    def step() -> None:
        outputs, _ = core.step_fn()
        for name, news in by_id(outputs).items():
            tokens[name] += news.new_token_ids

    for _ in range(5):
        step()
    core.pause("keep")
    while core.has_work():  # what is in flight still comes in
        step()
    counters = [(r.num_tokens, r.num_computed_tokens) for r in core.scheduler.running]
    num_plans = len(ghost.plans)
    core.add_request(make_engine_request("late", 5, 1))
    for _ in range(3):
        assert core.scheduler.schedule().num_scheduled_tokens == {}
    assert core.step_fn() == (None, False)
    assert counters == [(r.num_tokens, r.num_computed_tokens) for r in core.scheduler.running]
    assert core.has_unfinished_requests()
    assert len(ghost.plans) == num_plans
    core.resume()
    tokens["late"] = []
    while core.has_work():
        step()
    for name, count in (("a", 20), ("b", 20), ("late", 1)):
        prompt = make_engine_request(name, 5).prompt_token_ids
        assert tokens[name] == oracle(prompt, count, set())
    check_drained(core.scheduler)


def test_case_18_pause_wait_finishes_what_was_started() -> None:
    """Only the running one finishes; the waiting one starts after the resumption."""
    core, _ = make_core(max_num_seqs=1)
    for name in "ab":
        core.add_request(make_engine_request(name, 5, 4))
    core.step_fn()
    core.pause("wait")
    core.scheduler._preempt(core.scheduler.running[0])  # started, so it may come back
    ends: list[str] = []

    def drain() -> None:
        while core.has_work():
            outputs, _ = core.step_fn()
            ends.extend(n for n, news in by_id(outputs).items() if news.finish_reason is not None)

    drain()
    assert ends == ["a"]
    assert [request.request_id for request in core.scheduler.waiting] == ["b"]
    core.resume()
    drain()
    assert ends == ["a", "b"]
    check_drained(core.scheduler)


def test_case_18_pause_abort_tells_everybody() -> None:
    """Each request ends with reason abort, whether it ran or waited."""
    core, _ = make_core(max_num_seqs=1)
    for client, name in enumerate("ab"):
        core.add_request(make_engine_request(name, 5, 4, client=client))
    core.step_fn()
    core.pause("abort")
    news: dict[str, FinishReason | None] = {}
    clients = set()
    while core.has_work():
        outputs, _ = core.step_fn()
        clients |= {c for c, message in (outputs or {}).items() if message.outputs}
        for name, output in by_id(outputs).items():
            assert name not in news
            news[name] = output.finish_reason
    assert news == {"a": FinishReason.ABORT, "b": FinishReason.ABORT}
    assert clients == {0, 1}
    check_drained(core.scheduler)
    assert core.step_fn() == (None, False)


def test_case_18_pause_abort_of_a_waiting_request_needs_no_step() -> None:
    """Nothing was ever planned, but its client is told."""
    core, ghost = make_core()
    core.add_request(make_engine_request("a", 5, 4))
    core.pause("abort")
    assert core.has_work()
    outputs, executed = core.step_fn()
    assert not executed
    assert by_id(outputs)["a"].finish_reason is FinishReason.ABORT
    assert not core.has_work()
    assert ghost.plans == []
