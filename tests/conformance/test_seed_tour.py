"""Cases 1-11: the seed's example, one call of step_with_batch_queue, number by number."""

from __future__ import annotations

from planning_helpers import (
    FakeClock,
    add,
    by_id,
    check,
    make_configs,
    make_engine_request,
    make_scheduler,
    result,
)

from twostep.contracts.plan import SchedulerOutput
from twostep.engine.core import EngineCore
from twostep.scheduler.scheduler import Scheduler
from twostep.sim.recording_ghost import RecordingGhost

T41, T42 = 4141, 4242


def before_step_k(**config: object) -> tuple[Scheduler, SchedulerOutput]:
    """B knows 540 tokens and token 41 is in flight; A's first chunk is in flight too.

    Returns the scheduler and plan k-1, made by really running B alone for 40 tokens.
    """
    scheduler = make_scheduler(is_async=True, **config)
    add(scheduler, "B", 500, 1000)
    in_flight = scheduler.schedule()
    for token in range(1, 41):
        following = scheduler.schedule() if token < 40 else None
        scheduler.update_from_output(in_flight, result(in_flight, B=token))
        if following is not None:
            in_flight = following
    add(scheduler, "A", 20_000, 1000)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"B": 1, "A": 8191}
    return scheduler, plan


def counters(scheduler: Scheduler) -> tuple[tuple[int, int, int], tuple[int, bool]]:
    """B's and A's columns of the seed's table."""
    b, a = scheduler.requests["B"], scheduler.requests["A"]
    return (
        (b.num_tokens, b.num_computed_tokens, b.num_output_placeholders),
        (a.num_computed_tokens, a.is_prefill_chunk),
    )


def test_case_01_counter_table() -> None:
    """Every row of the three-call table."""
    scheduler, plan_before = before_step_k()
    a = scheduler.requests["A"]
    assert counters(scheduler) == ((540, 540, 1), (8191, True))
    plan_k = scheduler.schedule()
    assert counters(scheduler) == ((540, 541, 2), (16382, True))
    scheduler.update_from_output(plan_before, result(plan_before, B=T41))
    assert counters(scheduler) == ((541, 541, 1), (16382, True))
    plan_next = scheduler.schedule()
    assert plan_next.num_scheduled_tokens == {"B": 1, "A": 3618}
    assert counters(scheduler) == ((541, 542, 2), (20000, False))
    assert a.num_output_placeholders == 1
    scheduler.update_from_output(plan_k, result(plan_k, B=T42))
    assert counters(scheduler) == ((542, 542, 1), (20000, False))
    plan_after = scheduler.schedule()
    assert plan_after.num_scheduled_tokens == {"B": 1, "A": 1}
    assert counters(scheduler) == ((542, 543, 2), (20001, False))
    assert a.num_output_placeholders == 2
    outputs = scheduler.update_from_output(plan_next, result(plan_next, B=1, A=2))
    assert counters(scheduler)[0] == (543, 543, 1)
    assert by_id(outputs)["A"].new_token_ids == [2]
    check(scheduler)


def test_case_02_plan_of_step_k() -> None:
    """Changes only, values before the step, 512 new blocks for A and none for B."""
    scheduler, _ = before_step_k()
    held = scheduler.kv_cache_manager.get_block_ids("A")
    plan = scheduler.schedule()
    cached = plan.scheduled_cached_reqs
    assert cached.req_ids == ["B", "A"]
    assert cached.new_block_ids[0] is None
    assert cached.new_block_ids[1] is not None
    assert len(cached.new_block_ids[1]) == 512
    assert scheduler.kv_cache_manager.get_block_ids("A") == held + cached.new_block_ids[1]
    assert len(scheduler.kv_cache_manager.get_block_ids("B")) == 34
    assert cached.num_computed_tokens == [540, 8191]
    assert cached.num_output_tokens == [41, 0]
    assert plan.num_scheduled_tokens == {"B": 1, "A": 8191}
    assert list(plan.num_scheduled_tokens) == ["B", "A"]
    assert plan.total_num_scheduled_tokens == 8192
    assert plan.finished_req_ids == frozenset()
    assert plan.preempted_req_ids == frozenset()
    assert plan.scheduled_new_reqs == []
    assert plan.scheduled_spec_decode_tokens == {}


def run_tour() -> tuple[EngineCore, RecordingGhost]:
    """The engine core right before call k, with step k-1 in flight on a ghost device."""
    ghost = RecordingGhost(16, verify_kv=False)
    scheduler_config, cache_config = make_configs()
    core = EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=ghost,
        clock=FakeClock(),
    )
    core.add_request(make_engine_request("B", 500, 1000))
    for _ in range(40):
        core.step_fn()
    # Step k-1 must hold A's first chunk: take B's last result before A arrives.
    future, plan = core.batch_queue.pop()
    core.scheduler.update_from_output(plan, future.result())
    core.add_request(make_engine_request("A", 20_000, 1000))
    assert core.step_fn() == (None, True)
    return core, ghost


def test_case_03_flat_batch_of_step_k() -> None:
    """The plan is enough to lay the batch out: starts, positions, lengths, slots."""
    core, ghost = run_tour()
    core.step_fn()
    flat = ghost.batches[-1]
    assert flat.req_ids == ["B", "A"]
    assert flat.query_start_loc == [0, 1, 8192]
    assert flat.seq_lens == [541, 16382]
    assert flat.positions == [540, *range(8191, 16382)]
    assert flat.logits_indices == [0, 8191]
    table_b, table_a = ghost.rows["B"].table, ghost.rows["A"].table
    assert flat.slots[0] == table_b[33] * 16 + 12
    assert flat.slots[1] == table_a[511] * 16 + 15
    assert flat.slots[-1] == table_a[1023] * 16 + 13


def test_case_04_and_05_the_call_returns_step_k_minus_1() -> None:
    """Only B has news, the token of the step before; A's chunk says nothing."""
    core, ghost = run_tour()
    planned_before = len(ghost.plans)
    outputs, executed = core.step_fn()
    assert executed
    assert len(ghost.plans) == planned_before + 1
    assert outputs is not None
    assert list(outputs) == [0]
    (news,) = outputs[0].outputs
    assert news.request_id == "B"
    assert len(news.new_token_ids) == 1
    assert news.finish_reason is None
    assert core.scheduler.requests["B"].num_tokens == 541
    stats = outputs[0].scheduler_stats
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 0)


def test_case_06_budget_caps_the_chunk() -> None:
    """8191, not 11809; a threshold counts only while there is somebody to protect."""
    scheduler, _ = before_step_k()
    assert scheduler.schedule().num_scheduled_tokens["A"] == 8191

    scheduler = make_scheduler(is_async=True, long_prefill_token_threshold=1024)
    add(scheduler, "B", 500, 1000)
    plan = scheduler.schedule()
    add(scheduler, "A", 20_000, 1000)
    scheduler.update_from_output(plan, result(plan, B=1))
    assert scheduler.schedule().num_scheduled_tokens == {"B": 1, "A": 1024}

    alone = make_scheduler(is_async=True, long_prefill_token_threshold=1024)
    add(alone, "A", 20_000, 1000)
    assert alone.schedule().num_scheduled_tokens == {"A": 8192}
    assert alone.schedule().num_scheduled_tokens == {"A": 8192}


def test_case_07_input_token_never_visits_the_host() -> None:
    """B's input in step k is the device's own last token, whether the host saw it or not."""
    core, ghost = run_tour()
    core.step_fn()
    # The host has only now processed step k-1; the device had t41 when step k was queued.
    assert ghost.batches[-1].input_ids[0] == core.scheduler.requests["B"].all_token_ids[540]
    t42 = ghost.rows["B"].last_sampled
    assert core.scheduler.requests["B"].num_tokens == 541
    core.scheduler.kv_cache_manager.last_processed_step = -1  # the host learns nothing more
    plan = core.scheduler.schedule()
    assert ghost.execute_model(plan) is None
    assert ghost.batches[-1].input_ids[0] == t42


def test_case_08_a_chunk_has_a_logits_row_but_no_token() -> None:
    """num_sampled is 0 for a chunk and 1 for the last one."""
    core, ghost = run_tour()
    core.step_fn()
    assert ghost.batches[-1].num_sampled == [1, 0]
    assert len(ghost.batches[-1].logits_indices) == 2
    core.step_fn()
    assert ghost.plans[-1].num_scheduled_tokens == {"B": 1, "A": 3618}
    assert ghost.batches[-1].num_sampled == [1, 1]
    outputs, _ = core.step_fn()
    assert set(by_id(outputs)) == {"A", "B"}


def test_case_09_budget_left_after_the_last_chunk() -> None:
    """8192 - 1 - 3618. (Graph modes: issue B.)"""
    scheduler, before = before_step_k()
    scheduler.schedule()
    scheduler.update_from_output(before, result(before, B=T41))
    plan = scheduler.schedule()
    assert 8192 - plan.total_num_scheduled_tokens == 4573


def test_case_10_no_blocks_for_the_chunk() -> None:
    """A, the last of running, loses its KV; B's token is planned; nobody starts in that step."""
    scheduler, before = before_step_k()
    pool = scheduler.kv_cache_manager.pool
    taken = pool.get_new_blocks(pool.num_free_blocks - 500)  # A needs 512 more
    add(scheduler, "W", 16, 5)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"B": 1}
    assert plan.preempted_req_ids == {"A"}
    assert plan.scheduled_new_reqs == []
    assert [r.request_id for r in scheduler.waiting] == ["A", "W"]
    outputs = scheduler.update_from_output(before, result(before, B=T41))
    assert list(by_id(outputs)) == ["B"]
    pool.free_blocks(taken)
    check(scheduler)


def test_case_11_abort_during_the_step() -> None:
    """No news of B, its id in the next plan once, A untouched."""
    core, _ = run_tour()
    core.aborts_queue.put(["B"])
    outputs, _ = core.step_fn()
    assert by_id(outputs) == {}
    check(core.scheduler)
    core.step_fn()
    ghost_plans = core.executor.plans  # type: ignore[attr-defined]
    assert [plan.finished_req_ids for plan in ghost_plans[-2:]] == [frozenset(), {"B"}]
    assert ghost_plans[-1].num_scheduled_tokens == {"A": 3618}
    core.step_fn()
    assert ghost_plans[-1].finished_req_ids == frozenset()
