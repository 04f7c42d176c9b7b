"""Who gives way when blocks are short, and who need not."""

from __future__ import annotations

from planning_helpers import add, by_id, check, make_scheduler, result, run_step

from twostep.contracts.request import FinishReason
from twostep.scheduler.request import RequestStatus


def test_a_victim_that_gives_nothing_back_is_spared() -> None:
    """c, the newest, holds shared blocks only; so b gives way, and c keeps its work."""
    scheduler = make_scheduler(num_blocks=1 + 5, block_size=4, full_sequence_must_fit=False)
    shared = list(range(8))
    add(scheduler, "a", [*shared, 50, 51], 50)  # 2 shared, 1 own
    add(scheduler, "b", [70, 71, 72, 73, 74], 50)  # 2 own
    run_step(scheduler)
    newest = add(scheduler, "c", shared, 2)  # a's first two
    plan, _ = run_step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}
    plan, _ = run_step(scheduler)
    assert newest.status is RequestStatus.RUNNING or newest.status.is_finished
    assert plan.preempted_req_ids == {"b"}
    assert "c" in plan.num_scheduled_tokens


def test_when_all_share_everything_the_last_one_gives_way() -> None:
    """Somebody has to."""
    scheduler = make_scheduler(num_blocks=1 + 5, block_size=4)
    for name in "ab":
        add(scheduler, name, list(range(8)), 50)
        scheduler.schedule()
    assert scheduler._pick_victim().request_id == "b"


def test_drafts_never_cost_anybody_blocks() -> None:
    """Found by the simulator: without room for its drafts a request runs without them."""
    scheduler = make_scheduler(num_blocks=1 + 3, block_size=2, num_spec_tokens=1, caching=False)
    a = add(scheduler, "a", [1], 5)
    add(scheduler, "b", [1, 2, 3], 5)
    run_step(scheduler)
    a.spec_token_ids = [7]
    plan = scheduler.schedule()  # a: one slot left in its block; drafts would need another
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1}
    assert plan.scheduled_spec_decode_tokens == {}
    assert plan.preempted_req_ids == frozenset()


def test_watermark_keeps_blocks_free_at_admission() -> None:
    """A tenth of 21 blocks: two stay free while something runs; running requests ignore it."""
    scheduler = make_scheduler(num_blocks=21, watermark=0.1)
    assert scheduler.kv_cache_manager.watermark_blocks == 2
    add(scheduler, "alone", 20 * 16 - 1, 50)
    plan, _ = run_step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["alone"]  # nothing else runs: no reserve
    scheduler.finish_requests(["alone"], RequestStatus.FINISHED_ABORTED)
    scheduler.reset_prefix_cache()

    add(scheduler, "a", 16 * 16 - 2, 50)
    run_step(scheduler)
    add(scheduler, "three", 3 * 16 - 1, 50)
    plan, _ = run_step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["a"]  # 3 of 4 free would leave 1
    scheduler.finish_requests(["three"], RequestStatus.FINISHED_ABORTED)
    add(scheduler, "two", 2 * 16 - 1, 50)
    plan, _ = run_step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["a", "two"]
    for _ in range(3):
        run_step(scheduler)
    assert scheduler.kv_cache_manager.pool.num_free_blocks < 2


def test_window_a_full_hit_sees_one_position_more() -> None:
    """Found by the simulator: the last token of a full hit looks back from its own position."""
    scheduler = make_scheduler(num_blocks=50, block_size=1, window=5)
    for name in "ab":
        add(scheduler, name, [1, 2, 3, 4, 5], 1)
        plan, _ = run_step(scheduler)
    (new,) = plan.scheduled_new_reqs
    assert new.num_computed_tokens == 4
    assert 0 not in new.block_ids
    add(scheduler, "c", [1, 2, 3, 4, 5, 6], 1)  # stands behind the hit: four are enough
    plan, _ = run_step(scheduler)
    assert plan.scheduled_new_reqs[0].block_ids[0] == 0


def test_an_innocent_survivor_of_a_failed_plan_is_not_blamed() -> None:
    """Found by the simulator: the culprit was aborted before its step failed."""
    scheduler = make_scheduler(is_async=True)
    add(scheduler, "a", 5, 3)
    add(scheduler, "culprit", 5, 3)
    plan = scheduler.schedule()
    scheduler.finish_requests(["culprit"], RequestStatus.FINISHED_ABORTED)
    assert by_id(scheduler.fail_steps([plan], "kernel")) == {}
    tokens: list[int] = []
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        news = by_id(scheduler.update_from_output(plan, result(plan, a=1)))
        tokens += news["a"].new_token_ids
        check(scheduler)
    assert news["a"].finish_reason is FinishReason.LENGTH
    assert tokens == [1, 1, 1]


def test_blocks_shared_with_a_step_in_flight_only_do_come_back() -> None:
    """The other holder has ended; its fence falls with its step."""
    scheduler = make_scheduler(is_async=True, num_blocks=1 + 8, block_size=4)
    shared = list(range(8))
    add(scheduler, "gone", shared, 50)
    first = scheduler.schedule()
    request = add(scheduler, "a", shared, 50)
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"gone": 1, "a": 1}
    kv = scheduler.kv_cache_manager
    assert not kv.gives_blocks_back(request)
    scheduler.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED)
    assert kv.gives_blocks_back(request)
    scheduler.update_from_output(first, result(first, gone=1))
    scheduler.update_from_output(second, result(second, gone=1, a=1))
    check(scheduler)
