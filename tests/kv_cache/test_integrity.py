"""The integrity check must see every kind of damage, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planning_helpers import add, make_scheduler, run_step

from twostep.kv_cache.block import Block
from twostep.kv_cache.integrity import find_violations
from twostep.scheduler.scheduler import Scheduler


@pytest.fixture
def scheduler() -> Scheduler:
    """Two requests that share a prefix, twins included, and some free blocks."""
    scheduler = make_scheduler(num_blocks=20)
    for name, length in (("a", 40), ("b", 50)):
        add(scheduler, name, list(range(length)), 50)
        run_step(scheduler)
    assert find_violations(scheduler.kv_cache_manager, scheduler.requests) == []
    return scheduler


def blocks_of(scheduler: Scheduler, name: str) -> list[Block]:
    """The blocks of a request."""
    return scheduler.kv_cache_manager._tables[name].blocks


def leak(s: Scheduler) -> None:
    s.kv_cache_manager.pool.get_new_blocks(1)


def lose_reference(s: Scheduler) -> None:
    blocks_of(s, "b")[0].ref_cnt -= 1


def free_too_early(s: Scheduler) -> None:
    s.kv_cache_manager.pool.free_blocks([blocks_of(s, "a")[-1]])


def list_held_block(s: Scheduler) -> None:
    s.kv_cache_manager.pool.free_queue.append([blocks_of(s, "a")[-1]])


def miscount(s: Scheduler) -> None:
    s.kv_cache_manager.pool.free_queue.num_free_blocks += 1


def tear_list(s: Scheduler) -> None:
    next(iter(s.kv_cache_manager.pool.free_queue)).prev_free = None
    second = list(s.kv_cache_manager.pool.free_queue)[1]
    second.prev_free = None


def list_null_block(s: Scheduler) -> None:
    pool = s.kv_cache_manager.pool
    pool.free_queue.append([pool.null_block])


def count_null_block(s: Scheduler) -> None:
    s.kv_cache_manager.pool.null_block.ref_cnt = 2


def forget_hash(s: Scheduler) -> None:
    s.kv_cache_manager.pool.cached.popitem()


def stale_hash(s: Scheduler) -> None:
    blocks_of(s, "a")[0].block_hash = None


def wrong_content(s: Scheduler) -> None:
    s.requests["a"].block_hashes[1] = b"something else"


def orphan_table(s: Scheduler) -> None:
    del s.requests["a"]


def too_few_slots(s: Scheduler) -> None:
    s.requests["a"].num_computed_tokens = 1000


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leak, "has ref_cnt 1 but 0 holders"),
        (lose_reference, "has ref_cnt 1 but 2 holders"),
        (free_too_early, "has ref_cnt 0 but 1 holders"),
        (list_held_block, "is 1 times in the free list"),
        (miscount, "the count says"),
        (tear_list, "torn after block"),
        (list_null_block, "the null block is in the free list"),
        (count_null_block, "the null block was counted or cached"),
        (forget_hash, "maps to blocks None"),
        (stale_hash, "carry it"),
        (wrong_content, "has another's content"),
        (orphan_table, "is gone but holds"),
        (too_few_slots, "more computed tokens than slots"),
    ],
)
def test_damage_is_seen(
    scheduler: Scheduler, damage: Callable[[Scheduler], None], words: str
) -> None:
    """Each planted fault gives a line that names it."""
    damage(scheduler)
    found = find_violations(scheduler.kv_cache_manager, scheduler.requests)
    assert any(words in line for line in found), found


def test_without_requests_only_the_pool_is_checked(scheduler: Scheduler) -> None:
    """For callers that have no requests at hand."""
    orphan_table(scheduler)
    assert find_violations(scheduler.kv_cache_manager) == []
