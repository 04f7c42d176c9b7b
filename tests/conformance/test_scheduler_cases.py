"""Cases 20-36: budgets, admission, preemption, async counters."""

from __future__ import annotations

import pytest
from planning_helpers import (
    FakeGrammar,
    FakeGrammarFuture,
    add,
    by_id,
    check,
    make_scheduler,
    result,
    run_step,
    sample_all,
)

from twostep.contracts.outputs import SpecDecodeStats
from twostep.contracts.request import FinishReason
from twostep.scheduler.request import RequestStatus


def test_case_20_chunks_fill_what_decodes_leave() -> None:
    """1, 1, 1 and 97: the prompt of 300 in chunks 97 + 97 + 97 + 9."""
    scheduler = make_scheduler(budget=100)
    for name in ("D1", "D2", "D3"):
        add(scheduler, name, 5, 100)
    run_step(scheduler)
    add(scheduler, "P", 300, 100)
    chunks = []
    for _ in range(4):
        plan, _ = run_step(scheduler)
        assert list(plan.num_scheduled_tokens.values())[:3] == [1, 1, 1]
        chunks.append(plan.num_scheduled_tokens["P"])
    assert chunks == [97, 97, 97, 9]


def test_case_21_max_num_seqs() -> None:
    """Two run; the third starts in the step after one finishes."""
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, "a", 10, 2)
    add(scheduler, "b", 10, 3)
    add(scheduler, "c", 10, 3)
    plan, _ = run_step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["a", "b"]
    plan, outputs = run_step(scheduler)
    assert outputs["a"].finish_reason is FinishReason.LENGTH
    assert list(plan.num_scheduled_tokens) == ["a", "b"]
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 1, "c": 10}


def test_case_22_without_chunked_prefill() -> None:
    """A prompt that does not fit whole into the rest of the budget waits for the next step."""
    scheduler = make_scheduler(budget=100, max_model_len=100, enable_chunked_prefill=False)
    add(scheduler, "a", 60, 5)
    add(scheduler, "b", 80, 5)
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 60}
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 1, "b": 80}


def test_case_23_long_prefill_threshold() -> None:
    """512 each while there are two; the whole prompt when alone."""
    scheduler = make_scheduler(long_prefill_token_threshold=512)
    add(scheduler, "a", 2000, 5)
    add(scheduler, "b", 2000, 5)
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 512, "b": 512}
    scheduler = make_scheduler(long_prefill_token_threshold=512)
    add(scheduler, "a", 2000, 5)
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 2000}


def test_case_24_head_of_line() -> None:
    """The first that does not fit ends the pass."""
    scheduler = make_scheduler(num_blocks=1 + 7)
    add(scheduler, "holder", 50, 10)
    run_step(scheduler)
    assert scheduler.kv_cache_manager.pool.num_free_blocks == 3
    add(scheduler, "needs4", 64, 10)
    add(scheduler, "needs1", 10, 10)
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"holder": 1}


def test_case_25_fcfs_preemption() -> None:
    """R2 preempts itself for its 6th block, is refused in step 3, and comes back after R1."""
    scheduler = make_scheduler(num_blocks=1 + 10)
    add(scheduler, "R1", 64, 3)
    r2 = add(scheduler, "R2", 80, 10)
    run_step(scheduler)
    assert scheduler.kv_cache_manager.pool.num_free_blocks == 1
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"R1": 1}
    assert plan.preempted_req_ids == {"R2"}
    assert r2.status is RequestStatus.PREEMPTED
    assert r2.num_tokens == 81
    plan, outputs = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"R1": 1}
    assert plan.preempted_req_ids == frozenset()
    assert outputs["R1"].finish_reason is FinishReason.LENGTH
    plan, outputs = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"R2": 1}
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 80
    assert len(plan.scheduled_new_reqs[0].prefill_token_ids) == 81
    assert outputs["R2"].num_preemptions == 1


def test_case_26_priority_preemption() -> None:
    """The least important one goes, wherever it stands; its planned tokens return."""
    scheduler = make_scheduler(num_blocks=1 + 6, policy="priority", caching=False)
    add(scheduler, "p0", 32, 40, priority=0)
    run_step(scheduler)
    add(scheduler, "p5", 20, 40, priority=5)
    run_step(scheduler)
    add(scheduler, "p1", 15, 40, priority=1)
    run_step(scheduler)
    # p0 holds 3 blocks, p5 holds 2, p1 holds 1. p1's 17th token has no block.
    assert [r.request_id for r in scheduler.running] == ["p0", "p5", "p1"]
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"p0": 1, "p5": 1, "p1": 1}
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"p0": 1, "p1": 1}
    assert plan.total_num_scheduled_tokens == 2
    assert plan.preempted_req_ids == {"p5"}
    assert plan.scheduled_cached_reqs.req_ids == ["p0", "p1"]
    assert plan.scheduled_cached_reqs.num_computed_tokens == [35, 16]
    new_p1 = plan.scheduled_cached_reqs.new_block_ids[1]
    assert new_p1 is not None
    assert len(new_p1) == 1
    scheduler.update_from_output(plan, sample_all(scheduler, plan))
    check(scheduler)


def test_case_26_victim_ahead_of_the_needy() -> None:
    """Priorities 0, 5, 1 and the first one is short of a block: 5 goes."""
    scheduler = make_scheduler(num_blocks=1 + 4, policy="priority", caching=False)
    add(scheduler, "p0", 32, 40, priority=0)
    add(scheduler, "p5", 10, 40, priority=5, arrival=1.0)
    add(scheduler, "p1", 10, 40, priority=1, arrival=2.0)
    plan, _ = run_step(scheduler)
    scheduler.running.sort(key=lambda r: ["p0", "p5", "p1"].index(r.request_id))
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"p0": 1, "p1": 1}
    assert plan.preempted_req_ids == {"p5"}


@pytest.mark.parametrize(("caching", "planned"), [(False, 27), (True, 11)])
def test_case_27_resume_after_preemption(caching: bool, planned: int) -> None:
    """All known tokens are replayed, minus what is still cached; outputs do not change."""
    scheduler = make_scheduler(caching=caching)
    request = add(scheduler, "a", 20, 50)
    for token in range(100, 107):
        run_step(scheduler, token)
    assert request.num_output_tokens == 7
    scheduler._preempt(request)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": planned}
    (new,) = plan.scheduled_new_reqs
    assert len(new.prefill_token_ids) == 27
    assert new.prompt_len == 20
    assert new.prefill_token_ids[20:] == list(range(100, 107))
    assert request.num_preemptions == 1
    assert plan.preempted_req_ids == {"a"}
    outputs = by_id(scheduler.update_from_output(plan, result(plan, a=107)))
    assert outputs["a"].new_token_ids == [107]
    assert outputs["a"].prefill_stats is None


def test_case_28_and_30_requests_that_compile_are_skipped() -> None:
    """They hold nobody up, and keep their places over several steps."""
    scheduler = make_scheduler()
    grammars = [FakeGrammarFuture() for _ in range(3)]
    add(scheduler, "G0", 10, 50, grammar=grammars[0])
    add(scheduler, "G1", 10, 50, grammar=grammars[1])
    add(scheduler, "H", 10, 50)
    add(scheduler, "G2", 10, 50, grammar=grammars[2])
    for _ in range(3):
        plan, _ = run_step(scheduler)
        assert list(plan.num_scheduled_tokens) == ["H"]
        assert [r.request_id for r in scheduler.waiting] == ["G0", "G1", "G2"]
    grammars[1].is_done = True
    plan, _ = run_step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["H", "G1"]
    assert [r.request_id for r in scheduler.waiting] == ["G0", "G2"]


def test_case_30_skipped_requests_keep_their_place_in_a_heap() -> None:
    """The same under the priority policy."""
    scheduler = make_scheduler(policy="priority")
    for i in range(3):
        add(scheduler, f"G{i}", 10, 50, grammar=FakeGrammarFuture(), priority=3 - i)
    add(scheduler, "H", 10, 50, priority=9)
    for _ in range(3):
        plan, _ = run_step(scheduler)
        assert list(plan.num_scheduled_tokens) == ["H"]
        assert [r.request_id for r in scheduler.waiting] == ["G2", "G1", "G0"]


@pytest.mark.parametrize(("gate", "admitted"), [(True, False), (False, True)])
def test_case_29_full_sequence_gate(gate: bool, admitted: bool) -> None:
    """10 free blocks and a prompt of 12; the first chunk would need only 5."""
    scheduler = make_scheduler(num_blocks=1 + 14, budget=80, full_sequence_must_fit=gate)
    add(scheduler, "holder", 50, 10)
    run_step(scheduler)
    assert scheduler.kv_cache_manager.pool.num_free_blocks == 10
    add(scheduler, "big", 12 * 16, 10)
    plan, _ = run_step(scheduler)
    assert ("big" in plan.num_scheduled_tokens) is admitted


def test_case_31_finished_ids_are_sent_once() -> None:
    """S2 carries {X}, S3 carries nothing, and S2's set stays as it was sent."""
    scheduler = make_scheduler()
    add(scheduler, "X", 10, 50)
    add(scheduler, "Y", 10, 50)
    run_step(scheduler)
    scheduler.finish_requests(["X"], RequestStatus.FINISHED_ABORTED)
    second, _ = run_step(scheduler)
    third, _ = run_step(scheduler)
    assert second.finished_req_ids == {"X"}
    assert third.finished_req_ids == frozenset()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_case_32_no_step_beyond_a_certain_limit(max_tokens: int) -> None:
    """As many plans as tokens, although the tokens are not known when planning."""
    scheduler = make_scheduler(is_async=True)
    add(scheduler, "a", 10, max_tokens)
    plans = [scheduler.schedule()]
    delivered = []
    while scheduler.has_unfinished_requests():
        plans.append(scheduler.schedule())
        done = plans[len(delivered)]
        outputs = by_id(scheduler.update_from_output(done, result(done, a=7)))
        delivered += outputs["a"].new_token_ids
    assert sum("a" in plan.num_scheduled_tokens for plan in plans) == max_tokens
    assert len(delivered) == max_tokens


def test_case_33_a_stop_wastes_one_row() -> None:
    """The row behind an EOS is computed, its token is not delivered."""
    scheduler = make_scheduler(is_async=True)
    add(scheduler, "a", 10, 50, eos=2)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1}
    outputs = by_id(scheduler.update_from_output(first, result(first, a=2)))
    assert outputs["a"].finish_reason is FinishReason.STOP
    check(scheduler)
    third = scheduler.schedule()
    assert third.finished_req_ids == {"a"}
    assert by_id(scheduler.update_from_output(second, result(second, a=9))) == {}
    check(scheduler)


def test_case_34_async_drafts_trace() -> None:
    """K = 3: need stays 1 + K; refused drafts move both counters back."""
    scheduler = make_scheduler(is_async=True, num_spec_tokens=3)
    request = add(scheduler, "a", 100, 50)

    def state() -> tuple[int, int, int]:
        return request.num_tokens, request.num_computed_tokens, request.num_output_placeholders

    plan1 = scheduler.schedule()
    assert state() == (100, 100, 1)
    plan2 = scheduler.schedule()
    assert plan2.num_scheduled_tokens == {"a": 4}
    assert plan2.scheduled_spec_decode_tokens == {"a": [-1, -1, -1]}
    assert state() == (100, 104, 5)
    scheduler.update_from_output(plan1, result(plan1, a=1))
    assert state() == (101, 104, 4)
    plan3 = scheduler.schedule()
    assert plan3.num_scheduled_tokens == {"a": 4}
    assert state() == (101, 108, 8)
    outputs = by_id(scheduler.update_from_output(plan2, result(plan2, a=[2, 3])))
    assert outputs["a"].new_token_ids == [2, 3]
    assert state() == (103, 106, 4)
    assert request.num_computed_tokens - request.num_output_placeholders == 102
    scheduler.update_from_output(plan3, result(plan3, a=[4, 5, 6, 7]))
    assert state() == (107, 106, 0)
    check(scheduler)


def test_case_35_preempted_with_a_step_in_flight() -> None:
    """Its token is delivered, counters stay at zero, and it comes back only after that."""
    scheduler = make_scheduler(is_async=True)
    request = add(scheduler, "a", 10, 50)
    first = scheduler.schedule()
    scheduler._preempt(request)
    idle = scheduler.schedule()
    assert idle.num_scheduled_tokens == {}
    assert idle.preempted_req_ids == {"a"}
    assert [r.request_id for r in scheduler.waiting] == ["a"]
    outputs = by_id(scheduler.update_from_output(first, result(first, a=77)))
    assert outputs["a"].new_token_ids == [77]
    assert (request.num_computed_tokens, request.num_output_placeholders) == (0, 0)
    check(scheduler)
    resumed = scheduler.schedule()
    assert resumed.num_scheduled_tokens == {"a": 11}
    assert resumed.scheduled_new_reqs[0].prefill_token_ids[-1] == 77


def test_case_35_prefix_reset_drops_what_is_in_flight() -> None:
    """The token was made with KV that must not count: computed again, at once."""
    scheduler = make_scheduler(is_async=True)
    add(scheduler, "a", 32, 50)
    first = scheduler.schedule()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    resumed = scheduler.schedule()
    assert resumed.num_scheduled_tokens == {"a": 32}
    assert by_id(scheduler.update_from_output(first, result(first, a=77))) == {}
    outputs = by_id(scheduler.update_from_output(resumed, result(resumed, a=78)))
    assert outputs["a"].new_token_ids == [78]
    check(scheduler)


def test_case_36_a_mask_waits_for_the_token_before() -> None:
    """The plan says that its sampling waits, and the mask knows all tokens then.

    The first decode after a prefill owes no token, nor does a plan without structured requests.
    """
    scheduler = make_scheduler(is_async=True)
    grammar = FakeGrammar()
    add(scheduler, "S", 10, 50, grammar=FakeGrammarFuture(grammar, is_done=True))
    add(scheduler, "U", 10, 50)
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {"S": 10, "U": 10}
    assert first.has_structured_output_requests  # the first decode after a prefill: no token owed
    masks = scheduler.get_grammar_bitmask(first)
    assert masks is not None
    assert masks.request_ids == ["S"]
    assert not first.pending_structured_output_tokens
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"S": 1, "U": 1}
    assert second.pending_structured_output_tokens
    scheduler.update_from_output(first, result(first, S=1, U=1))
    assert grammar.accepted == [1]
    masks = scheduler.get_grammar_bitmask(second)
    assert masks is not None
    assert masks.bitmask[0] == 1  # filled after U k
    scheduler.update_from_output(second, result(second, S=1, U=1))
    third = scheduler.schedule()
    assert not third.pending_structured_output_tokens  # nothing is on its way
    scheduler.finish_requests(["S"], RequestStatus.FINISHED_ABORTED)
    fourth = scheduler.schedule()
    assert fourth.num_scheduled_tokens == {"U": 1}
    assert not fourth.pending_structured_output_tokens


def test_case_56_sync_drafts() -> None:
    """K = 3: need 4; one of three accepted rolls two back; a budget of 2 plans one draft."""
    scheduler = make_scheduler(num_spec_tokens=3, max_model_len=200)
    request = add(scheduler, "a", 99, 80)
    plan = scheduler.schedule()
    output = result(plan, a=7)
    output.draft_token_ids = {"a": [11, 12, 13], "gone": [1]}
    scheduler.update_from_output(plan, output)
    assert (request.num_tokens, request.num_computed_tokens) == (100, 99)

    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 4}
    assert plan.scheduled_spec_decode_tokens == {"a": [11, 12, 13]}
    assert request.num_computed_tokens == 103
    output = result(plan, a=[11, 50])
    output.draft_token_ids = {"a": [21, 22, 23]}
    (message,) = scheduler.update_from_output(plan, output).values()
    assert (request.num_tokens, request.num_computed_tokens) == (102, 101)
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.spec_decode == SpecDecodeStats(
        num_drafts=1,
        num_draft_tokens=3,
        num_accepted_tokens=1,
        num_accepted_tokens_per_pos=[1, 0, 0],
    )
    assert scheduler.schedule().num_scheduled_tokens == {"a": 4}

    scheduler = make_scheduler(num_spec_tokens=3, budget=2)
    request = add(scheduler, "a", 1, 80)
    plan = scheduler.schedule()
    output = result(plan, a=7)
    output.draft_token_ids = {"a": [11, 12, 13]}
    scheduler.update_from_output(plan, output)
    plan = scheduler.schedule()
    assert plan.scheduled_spec_decode_tokens == {"a": [11]}


def test_case_56_drafts_of_a_chunk_are_ignored() -> None:
    """A prompt that is not done has nothing to follow."""
    scheduler = make_scheduler(num_spec_tokens=3, budget=8)
    request = add(scheduler, "a", 20, 80)
    plan = scheduler.schedule()
    output = result(plan)
    output.draft_token_ids = {"a": [1, 2, 3]}
    scheduler.update_from_output(plan, output)
    assert request.spec_token_ids == []
