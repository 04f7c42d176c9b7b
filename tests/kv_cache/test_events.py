"""Clients that asked are told what can be found in the prefix cache, and what no longer."""

from __future__ import annotations

from planning_helpers import add, make_scheduler, sample_all

from twostep.contracts.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from twostep.scheduler.request import RequestStatus
from twostep.scheduler.scheduler import Scheduler


def step(scheduler: Scheduler) -> list[KVCacheEvent]:
    """One step; the events that came with its news."""
    plan = scheduler.schedule()
    (message,) = scheduler.update_from_output(plan, sample_all(scheduler, plan)).values()
    return message.kv_events or []


def test_a_mirror_of_the_cache_can_be_kept_from_the_events() -> None:
    """Applied in order, they give exactly the hashes that can be found, chained as they are."""
    scheduler = make_scheduler(num_blocks=1 + 8, events=True)
    mirror: dict[bytes, tuple[bytes | None, list[int]]] = {}

    def apply(events: list[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                for index, block_hash in enumerate(event.block_hashes):
                    tokens = event.token_ids[index * size : (index + 1) * size]
                    mirror[block_hash] = (parent, tokens)
                    parent = block_hash
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del mirror[block_hash]
            else:
                mirror.clear()

    for number, length in enumerate((40, 70, 40, 100)):
        prompt = [number // 3] * length
        add(scheduler, f"r{number}", prompt, 30, salt="tenant")
        for _ in range(20):
            apply(step(scheduler))
            assert mirror.keys() == scheduler.kv_cache_manager.pool.cached.keys()
        request = scheduler.requests[f"r{number}"]
        for index, block_hash in enumerate(request.block_hashes):
            parent = request.block_hashes[index - 1] if index else None
            tokens = request.all_token_ids[index * 16 : (index + 1) * 16].tolist()
            assert mirror[block_hash] == (parent, tokens)
        scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    assert scheduler.reset_prefix_cache()
    add(scheduler, "last", 5, 1)
    apply(step(scheduler))
    assert mirror == {}


def test_events_are_off_unless_asked_for() -> None:
    """And cost nothing then."""
    scheduler = make_scheduler()
    add(scheduler, "a", 40, 30)
    assert step(scheduler) == []
    assert scheduler.kv_cache_manager.pool.removed is None


def test_a_reset_is_told_once() -> None:
    """With the next news."""
    scheduler = make_scheduler(events=True)
    scheduler.reset_prefix_cache()
    add(scheduler, "a", 5, 30)
    assert step(scheduler) == [AllBlocksCleared()]
    assert step(scheduler) == []


def test_withdrawn_content_is_told() -> None:
    """A request with bad numbers: what it had stored is removed again."""
    scheduler = make_scheduler(events=True)
    add(scheduler, "a", 40, 30)
    plan = scheduler.schedule()
    output = sample_all(scheduler, plan)
    output.failed_req_ids["a"] = "NaN"
    (message,) = scheduler.update_from_output(plan, output).values()
    stored, *removed = message.kv_events or []
    assert isinstance(stored, BlockStored)
    assert [h for event in removed for h in event.block_hashes] == stored.block_hashes
    assert all(isinstance(event, BlockRemoved) for event in removed)
