"""Blocks are never handed out before every step planned with them was processed."""

from __future__ import annotations

from planning_helpers import add, by_id, check, make_scheduler, result

from twostep.scheduler.request import RequestStatus


def test_blocks_of_an_aborted_request_wait_for_its_step() -> None:
    """Free only after the step in flight that writes them came back."""
    scheduler = make_scheduler(is_async=True, num_blocks=5)
    pool = scheduler.kv_cache_manager.pool
    add(scheduler, "a", 40, 50)
    plan = scheduler.schedule()
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert pool.num_free_blocks == 1
    check(scheduler)
    add(scheduler, "b", 40, 50)
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.update_from_output(plan, result(plan, a=1))
    assert pool.num_free_blocks == 4
    assert scheduler.schedule().num_scheduled_tokens == {"b": 40}


def test_a_running_request_waits_for_parked_blocks_instead_of_preempting() -> None:
    """One step of patience beats recomputing somebody; nobody else may take the blocks."""
    scheduler = make_scheduler(is_async=True, num_blocks=1 + 4, caching=False)
    a = add(scheduler, "a", 32, 50)
    add(scheduler, "b", 20, 1)
    first = scheduler.schedule()
    add(scheduler, "w", 10, 50)
    # a needs a third block; b's two come back once the first step was processed. Here b is
    # aborted, so that they are parked.
    scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {}
    assert second.preempted_req_ids == frozenset()
    assert a.status is RequestStatus.RUNNING
    scheduler.update_from_output(first, result(first, a=1, b=1))
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 1, "w": 10}
    check(scheduler)


def test_parked_blocks_shared_with_a_living_request_do_not_count() -> None:
    """They will not become free, so waiting for them would be in vain: preempt."""
    scheduler = make_scheduler(is_async=True, num_blocks=1 + 4)
    shared = list(range(16))
    add(scheduler, "a", [*shared, 50, 51], 50)  # 2 blocks
    first = scheduler.schedule()
    add(scheduler, "b", [*shared, 60], 50)  # 1 shared, 1 own
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1, "b": 1}
    kv = scheduler.kv_cache_manager
    taken = kv.pool.get_new_blocks(1)
    scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    a = scheduler.requests["a"]
    assert kv.pool.num_free_blocks == 0
    assert kv.fits_when_released(a, 14)  # one more block: b's own one
    assert not kv.fits_when_released(a, 30)  # two more: the shared one is a's already
    kv.pool.free_blocks(taken)
    scheduler.update_from_output(first, result(first, a=1))
    scheduler.update_from_output(second, result(second, a=1, b=1))
    check(scheduler)


def test_blocks_behind_the_window_wait_for_the_step_that_reads_them() -> None:
    """The step in flight still looks at the block that the next one no longer needs."""
    scheduler = make_scheduler(is_async=True, window=16, block_size=4, caching=False)
    kv = scheduler.kv_cache_manager
    add(scheduler, "a", 20, 50)
    first = scheduler.schedule()
    free_before = kv.pool.num_free_blocks
    second = scheduler.schedule()  # takes a block, so the manager looks at the window
    assert kv.get_block_ids("a")[0] == 0
    assert kv.pool.num_free_blocks == free_before - 1
    assert list(kv._parked) == [first.step_id]
    assert by_id(scheduler.update_from_output(first, result(first, a=1)))
    assert kv.pool.num_free_blocks == free_before
    scheduler.update_from_output(second, result(second, a=1))
    check(scheduler)


def test_withdrawn_content_is_not_found() -> None:
    """Tokens taken out of a plan were published but never computed."""
    scheduler = make_scheduler(policy="priority", num_blocks=1 + 8, budget=32)
    low = add(scheduler, "low", list(range(64)), 9, priority=9)
    scheduler.update_from_output(plan := scheduler.schedule(), result(plan))
    assert low.num_computed_tokens == 32
    high = add(scheduler, "high", list(range(500, 531)), 50, priority=0)
    kv = scheduler.kv_cache_manager
    step = scheduler.schedule()  # low's second chunk uses the budget
    assert step.num_scheduled_tokens == {"low": 32}
    assert len(kv.pool.cached) == 4
    kv.withdraw(low, 32)
    assert len(kv.pool.cached) == 2
    kv.withdraw(high)  # holds nothing
    scheduler.update_from_output(step, result(step, low=1))
    check(scheduler)


def test_waiting_requests_do_not_take_blocks_that_a_running_one_is_short_of() -> None:
    """a needs two blocks, one is free and two are on their way: w has to wait its turn."""
    scheduler = make_scheduler(
        is_async=True,
        num_blocks=1 + 5,
        long_prefill_token_threshold=32,
        full_sequence_must_fit=False,
    )
    add(scheduler, "a", 64, 10)
    add(scheduler, "b", 20, 10)
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {"a": 32, "b": 20}
    scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    add(scheduler, "w", 10, 10)
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.update_from_output(first, result(first, b=1))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 32, "w": 10}
    check(scheduler)
