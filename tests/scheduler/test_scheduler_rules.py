"""Rules of the scheduler beyond the numbered cases."""

from __future__ import annotations

import math

import pytest
from planning_helpers import add, by_id, check, ids, make_scheduler, result, run_step, sample_all

from twostep.contracts.errors import UsageError
from twostep.contracts.outputs import ModelRunnerOutput, TokenLogprobs
from twostep.contracts.request import FinishReason
from twostep.scheduler.queues import FCFSRequestQueue, PriorityRequestQueue
from twostep.scheduler.request import RequestStatus


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"budget": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": -5}, "max_model_len is -5"),
        ({"num_blocks": 1}, "1 blocks of 16 tokens cannot hold"),
        ({"block_size": 0}, "cannot hold anything"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1"),
        ({"watermark": 1.0}, "watermark is 1"),
        ({"watermark": -0.1}, "watermark is -0.1"),
        ({"watermark": math.nan}, "watermark is nan"),
        ({"budget": 50, "max_model_len": 60, "enable_chunked_prefill": False}, "from 50 to"),
    ],
)
def test_impossible_configurations(config: dict[str, object], words: str) -> None:
    """One line that names field, value and cure."""
    with pytest.raises(UsageError, match=words):
        make_scheduler(**config)


def test_more_sequences_than_budget() -> None:
    """Every running request must get a token in every step, or the last ones would starve."""
    scheduler = make_scheduler(budget=3, max_num_seqs=10)
    for i in range(10):
        add(scheduler, f"r{i}", 1, 5)
    plan, _ = run_step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["r0", "r1", "r2"]


def test_outputs_are_grouped_by_client_and_stats_go_to_one() -> None:
    """Each front end hears of its own requests only."""
    scheduler = make_scheduler()
    for client in (3, 1, 3):
        add(scheduler, f"r{len(scheduler.requests)}", 10, 50, client=client)
    plan = scheduler.schedule()
    outputs = scheduler.update_from_output(plan, sample_all(scheduler, plan))
    assert {client: ids(message.outputs) for client, message in outputs.items()} == {
        3: ["r0", "r2"],
        1: ["r1"],
    }
    assert [message.scheduler_stats is not None for message in outputs.values()] == [True, False]
    assert outputs[3].timestamp == outputs[1].timestamp > 0


def test_stats_count_once() -> None:
    """Lookups and hits since the last stats; a resumption is not a lookup."""
    scheduler = make_scheduler()
    prompt = list(range(48))
    stats = []
    for name in ("a", "b", None):
        if name:
            add(scheduler, name, prompt, 50)
        plan = scheduler.schedule()
        outputs = scheduler.update_from_output(plan, sample_all(scheduler, plan))
        stats.append(outputs[0].scheduler_stats)
    assert [(s.prefix_cache_queries, s.prefix_cache_hits) for s in stats if s] == [
        (48, 0),
        (48, 47),
        (0, 0),
    ]
    scheduler._preempt(scheduler.running[-1])
    plan = scheduler.schedule()
    (message,) = scheduler.update_from_output(plan, sample_all(scheduler, plan)).values()
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.num_preemptions == 1
    assert message.scheduler_stats.prefix_cache_queries == 0


def test_a_chunk_without_news_still_carries_stats() -> None:
    """An empty message for client 0."""
    scheduler = make_scheduler(budget=10)
    add(scheduler, "a", 30, 5, client=4)
    plan = scheduler.schedule()
    outputs = scheduler.update_from_output(plan, result(plan))
    assert list(outputs) == [0]
    assert outputs[0].outputs == []
    assert outputs[0].scheduler_stats is not None


def test_two_equal_prompts_in_one_step_share_their_blocks() -> None:
    """The second finds what the first is about to compute: n > 1 costs one prefill."""
    scheduler = make_scheduler()
    prompt = list(range(49))
    add(scheduler, "a", prompt, 5)
    add(scheduler, "b", prompt, 5)
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 49, "b": 1}
    kv = scheduler.kv_cache_manager
    assert kv.get_block_ids("a")[:3] == kv.get_block_ids("b")[:3]


def test_an_answer_becomes_part_of_the_cached_prefix() -> None:
    """The next turn of a conversation finds prompt and answer, sync and async alike."""
    for is_async in (False, True):
        scheduler = make_scheduler(is_async=is_async)
        prompt = list(range(30))
        add(scheduler, "a", prompt, 19)
        answer: list[int] = []
        plans = []
        while scheduler.has_unfinished_requests():
            if len(plans) <= is_async:
                plans.append(scheduler.schedule())
                continue
            plan = plans.pop(0)
            news = by_id(
                scheduler.update_from_output(plan, sample_all(scheduler, plan, len(answer) + 100))
            )
            if "a" in news:
                answer += news["a"].new_token_ids
        assert len(answer) == 19
        for plan in plans:
            scheduler.update_from_output(plan, result(plan))
        add(scheduler, "b", [*prompt, *answer, 7, 8, 9], 5)
        plan, _ = run_step(scheduler)
        assert plan.scheduled_new_reqs[0].num_computed_tokens == 48


def test_salts_do_not_share() -> None:
    """Tenants with different salts cannot tell what others asked."""
    scheduler = make_scheduler()
    prompt = list(range(64))
    for salt in (None, "x", "y", "x"):
        add(scheduler, f"r{len(scheduler.requests)}", prompt, 50, salt=salt)
        plan, _ = run_step(scheduler)
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 63
    hits = [r.prefill_stats for r in scheduler.running]
    assert hits == [None] * 4


def test_a_row_that_is_missing_ends_the_request() -> None:
    """It would wait for ever otherwise."""
    scheduler = make_scheduler()
    add(scheduler, "a", 10, 5)
    add(scheduler, "b", 10, 5)
    plan = scheduler.schedule()
    output = ModelRunnerOutput(req_ids=["b"], sampled_token_ids=[[1]])
    news = by_id(scheduler.update_from_output(plan, output))
    assert news["a"].finish_reason is FinishReason.ERROR
    assert news["a"].stop_reason == "the executor returned no token for this request"
    assert news["b"].new_token_ids == [1]
    check(scheduler)


def test_a_missing_token_ends_the_request_but_a_chunk_has_none() -> None:
    """An empty row is right for a chunk only."""
    scheduler = make_scheduler(budget=10)
    add(scheduler, "a", 15, 5)
    plan = scheduler.schedule()
    assert by_id(scheduler.update_from_output(plan, result(plan))) == {}
    plan = scheduler.schedule()
    news = by_id(scheduler.update_from_output(plan, result(plan)))
    assert news["a"].finish_reason is FinishReason.ERROR


def test_bad_numbers_end_one_request_and_leave_nothing_to_find() -> None:
    """NaN logits: its KV may be bad too."""
    scheduler = make_scheduler()
    prompt = list(range(40))
    add(scheduler, "bad", prompt, 50)
    add(scheduler, "good", 20, 50)
    plan = scheduler.schedule()
    output = sample_all(scheduler, plan)
    output.failed_req_ids["bad"] = "NaN logits"
    news = by_id(scheduler.update_from_output(plan, output))
    assert news["bad"].finish_reason is FinishReason.ERROR
    assert news["bad"].stop_reason == "NaN logits"
    assert news["bad"].new_token_ids == []
    assert news["good"].finish_reason is None
    check(scheduler)
    add(scheduler, "again", prompt, 50)
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens["again"] == 40
    assert plan.finished_req_ids == {"bad"}


def test_bad_numbers_of_a_preempted_request() -> None:
    """The failure arrives when the request is already waiting again."""
    scheduler = make_scheduler(is_async=True)
    request = add(scheduler, "bad", 20, 50)
    plan = scheduler.schedule()
    scheduler._preempt(request)
    output = result(plan, bad=1)
    output.failed_req_ids["bad"] = "NaN logits"
    news = by_id(scheduler.update_from_output(plan, output))
    assert news["bad"].finish_reason is FinishReason.ERROR
    assert not scheduler.has_unfinished_requests()
    check(scheduler)


def test_a_stale_token_can_end_a_preempted_request() -> None:
    """It leaves the waiting queue, and no later plan contains it."""
    scheduler = make_scheduler(is_async=True)
    request = add(scheduler, "a", 20, 1)
    plan = scheduler.schedule()
    scheduler._preempt(request)
    news = by_id(scheduler.update_from_output(plan, result(plan, a=5)))
    assert news["a"].finish_reason is FinishReason.LENGTH
    assert scheduler.schedule().num_scheduled_tokens == {}
    check(scheduler)


def test_a_reused_id_does_not_get_the_old_token() -> None:
    """The first request of this id was aborted with a step in flight."""
    scheduler = make_scheduler(is_async=True)
    add(scheduler, "a", 20, 50)
    old = scheduler.schedule()
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    add(scheduler, "a", [1, 2, 3], 50)
    assert by_id(scheduler.update_from_output(old, result(old, a=9))) == {}
    new = scheduler.schedule()
    assert new.finished_req_ids == {"a"}
    assert new.scheduled_new_reqs[0].prefill_token_ids == [1, 2, 3]


def test_a_request_longer_than_the_pool_ends_with_length() -> None:
    """Not with preempting itself for ever (B01)."""
    scheduler = make_scheduler(num_blocks=16, max_model_len=1024)
    add(scheduler, "a", 200, 200)
    count = 0
    while scheduler.has_unfinished_requests():
        _, outputs = run_step(scheduler)
        count += 1
    assert count == 40
    assert outputs["a"].finish_reason is FinishReason.LENGTH


def rows(start: int, stop: int) -> list[TokenLogprobs]:
    """Prompt logprobs of positions start..stop-1."""
    return [TokenLogprobs(token_ids=[p], logprobs=[-1.0], rank=1) for p in range(start, stop)]


def test_prompt_logprobs_survive_chunks_and_preemption() -> None:
    """Told once, with the first output; positions computed twice are told once; no cache hit."""
    scheduler = make_scheduler(budget=16)
    prompt = list(range(40))
    add(scheduler, "warm", prompt, 1)
    for _ in range(3):
        run_step(scheduler)
    request = add(scheduler, "a", prompt, 5, prompt_logprobs=1)
    pieces = [(0, 16), (16, 32)]
    for start, stop in pieces:
        plan = scheduler.schedule()
        assert plan.num_scheduled_tokens == {"a": 16}
        output = result(plan)
        output.prompt_logprobs["a"] = rows(start, stop)
        assert by_id(scheduler.update_from_output(plan, output)) == {}
    scheduler._preempt(request)
    news = {}
    for start, stop in [*pieces, (32, 39)]:
        plan = scheduler.schedule()
        output = sample_all(scheduler, plan)
        output.prompt_logprobs["a"] = rows(start, stop)
        output.prompt_logprobs["stranger"] = rows(0, 3)
        news = by_id(scheduler.update_from_output(plan, output))
    assert news["a"].new_prompt_logprobs == rows(0, 39)
    assert news["a"].prefill_stats is not None
    assert news["a"].prefill_stats.num_cached_tokens == 0
    _, news = run_step(scheduler)
    assert news["a"].new_prompt_logprobs is None
    # Nothing is owed any more: a resumption may read the cache, and what it brings is ignored.
    scheduler._preempt(request)
    plan = scheduler.schedule()
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 32
    output = sample_all(scheduler, plan)
    output.prompt_logprobs["a"] = rows(32, 39)
    assert by_id(scheduler.update_from_output(plan, output))["a"].new_prompt_logprobs is None


def test_drafts_are_cut_to_the_budget_and_to_the_longest_sequence() -> None:
    """Sync K = 3 with 2 tokens of budget: one draft; near the end: no draft behind it."""
    scheduler = make_scheduler(num_spec_tokens=3, budget=2)
    request = add(scheduler, "a", [1], 50)
    run_step(scheduler)
    request.spec_token_ids = [7, 8, 9]
    plan = scheduler.schedule()
    assert plan.scheduled_spec_decode_tokens == {"a": [7]}
    assert request.num_computed_tokens == 3
    outputs = by_id(scheduler.update_from_output(plan, result(plan, a=[5])))
    assert outputs["a"].new_token_ids == [5]
    assert (request.num_tokens, request.num_computed_tokens) == (3, 2)
    check(scheduler)

    scheduler = make_scheduler(num_spec_tokens=3, max_model_len=102)
    request = add(scheduler, "a", list(range(99)), 50)
    run_step(scheduler)
    assert request.num_computed_tokens == 99
    request.spec_token_ids = [7, 8, 9]
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 2}
    assert plan.scheduled_spec_decode_tokens == {"a": [7]}


def test_no_draft_fits() -> None:
    """The budget is enough for the known token only."""
    scheduler = make_scheduler(num_spec_tokens=3, budget=1)
    request = add(scheduler, "a", [1], 50)
    other = add(scheduler, "b", [1], 50)
    run_step(scheduler)
    request.spec_token_ids = [7, 8, 9]
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1}
    assert plan.scheduled_spec_decode_tokens == {}
    assert request.spec_token_ids == []
    assert other.status is RequestStatus.WAITING
    outputs = by_id(scheduler.update_from_output(plan, result(plan, a=5)))
    assert outputs["a"].new_token_ids == [5]
    check(scheduler)


def test_only_some_requests_have_drafts() -> None:
    """A row without drafts is not rolled back; a preempted draft plan forgets its drafts."""
    scheduler = make_scheduler(num_spec_tokens=2)
    a, b = add(scheduler, "a", 5, 50), add(scheduler, "b", 5, 50)
    run_step(scheduler)
    a.spec_token_ids = [7, 8]
    plan = scheduler.schedule()
    outputs = by_id(scheduler.update_from_output(plan, result(plan, a=[7, 8, 9], b=3)))
    assert outputs["a"].new_token_ids == [7, 8, 9]
    assert (a.num_tokens, a.num_computed_tokens) == (9, 8)
    assert (b.num_tokens, b.num_computed_tokens) == (7, 6)


def test_queue_orders() -> None:
    """FCFS keeps arrival order; priority breaks every tie."""
    scheduler = make_scheduler()
    requests = [
        add(scheduler, name, 5, 5, priority=priority, arrival=arrival)
        for name, priority, arrival in [("d", 1, 0.0), ("b", 0, 1.0), ("a", 0, 1.0), ("c", 0, 2.0)]
    ]
    fcfs, priority = FCFSRequestQueue(), PriorityRequestQueue()
    for queue in (fcfs, priority):
        for request in requests:
            queue.add_request(request)
    assert [r.request_id for r in fcfs] == ["d", "b", "a", "c"]
    assert [r.request_id for r in priority] == ["a", "b", "c", "d"]
    for queue in (fcfs, priority):
        queue.remove_request(requests[1])
        assert len(queue) == 3
    assert fcfs.pop_request() is fcfs_first(requests)
    assert [priority.pop_request().request_id for _ in range(3)] == ["a", "c", "d"]


def fcfs_first(requests):  # type: ignore[no-untyped-def]
    """The first that came."""
    return requests[0]


def test_status_words() -> None:
    """Every end has a reason, nothing else has."""
    assert [s.finish_reason for s in RequestStatus if not s.is_finished] == [None] * 4
    assert [str(s.finish_reason) for s in RequestStatus if s.is_finished] == [
        "stop",
        "length",
        "abort",
        "error",
        "repetition",
    ]


def test_tokens_taken_out_of_a_plan_are_not_found() -> None:
    """low's chunk was published when planned; then high needed its blocks in the same step."""
    scheduler = make_scheduler(
        policy="priority",
        num_blocks=1 + 7,
        max_model_len=112,
        long_prefill_token_threshold=32,
        full_sequence_must_fit=False,
    )
    add(scheduler, "low", list(range(100)), 5, priority=9)
    run_step(scheduler)
    scheduler._preempt(scheduler.running[0])
    scheduler.reset_prefix_cache()
    add(scheduler, "high", list(range(500, 560)), 1, priority=0)
    first, _ = run_step(scheduler)
    assert first.num_scheduled_tokens == {"high": 32, "low": 32}
    scheduler.running.reverse()  # low is planned before high
    second, _ = run_step(scheduler)
    assert second.num_scheduled_tokens == {"high": 28}
    assert second.preempted_req_ids == {"low"}
    third, _ = run_step(scheduler)
    assert [new.num_computed_tokens for new in third.scheduled_new_reqs] == [32]


def test_drafts_leave_a_token_to_everybody_behind() -> None:
    """They are a gamble; a token of the next request is not."""
    scheduler = make_scheduler(num_spec_tokens=3, budget=4)
    request = add(scheduler, "a", [1], 50)
    add(scheduler, "b", [1], 50)
    run_step(scheduler)
    request.spec_token_ids = [7, 8, 9]
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 3, "b": 1}
    assert plan.scheduled_spec_decode_tokens == {"a": [7, 8]}
    scheduler.update_from_output(plan, result(plan, a=[5], b=[5]))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a", "b"]


def test_async_drafts_stop_at_the_longest_sequence() -> None:
    """All positions are planned; what comes next depends on how many drafts are accepted."""
    scheduler = make_scheduler(is_async=True, num_spec_tokens=3, max_model_len=9)
    request = add(scheduler, "a", list(range(5)), 50)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 3}
    scheduler.update_from_output(first, result(first, a=1))
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {}
    scheduler.update_from_output(second, result(second, a=2))
    assert (request.num_tokens, request.num_computed_tokens) == (7, 6)
    assert request.num_output_placeholders == 0
    assert scheduler.schedule().num_scheduled_tokens == {"a": 2}
