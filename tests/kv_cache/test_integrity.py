"""The integrity check must see every kind of damage, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planning_helpers import add, make_scheduler, run_step

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


def blocks_of(scheduler: Scheduler, name: str) -> list[int]:
    """The blocks of a request."""
    return scheduler.kv_cache_manager._tables[name].block_ids


def leak(s: Scheduler) -> None:
    s.kv_cache_manager.pool.get_new_blocks(1)


def lose_reference(s: Scheduler) -> None:
    del s.kv_cache_manager.pool.extra_refs[blocks_of(s, "b")[0]]


def count_one_too_many(s: Scheduler) -> None:
    s.kv_cache_manager.pool.extra_refs[blocks_of(s, "b")[0]] += 1


def keep_a_count_of_nothing(s: Scheduler) -> None:
    s.kv_cache_manager.pool.extra_refs[blocks_of(s, "a")[-1]] = 0


def free_too_early(s: Scheduler) -> None:
    s.kv_cache_manager.pool.free_blocks([blocks_of(s, "a")[-1]])


def list_twice(s: Scheduler) -> None:
    pool = s.kv_cache_manager.pool
    pool.unhashed.append(pool.unhashed[0])


def miscount(s: Scheduler) -> None:
    s.kv_cache_manager.pool.reusable.count += 1


def list_null_block(s: Scheduler) -> None:
    s.kv_cache_manager.pool.unhashed.append(0)


def cache_null_block(s: Scheduler) -> None:
    s.kv_cache_manager.pool.cache_blocks([0], [b"null"])


def forget_hash(s: Scheduler) -> None:
    s.kv_cache_manager.pool.cached.popitem()


def stale_hash(s: Scheduler) -> None:
    s.kv_cache_manager.pool.hash_of[blocks_of(s, "a")[0]] = None


def find_a_worthless_block(s: Scheduler) -> None:
    pool = s.kv_cache_manager.pool
    pool.reusable.append([pool.unhashed.pop()])


def hide_a_findable_block(s: Scheduler) -> None:
    pool = s.kv_cache_manager.pool
    pool.cache_blocks(pool.unhashed[:1], [b"found"])


def wrong_content(s: Scheduler) -> None:
    s.requests["a"].block_hashes[1] = b"something else"


def orphan_table(s: Scheduler) -> None:
    del s.requests["a"]


def too_few_slots(s: Scheduler) -> None:
    s.requests["a"].num_computed_tokens = 1000


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leak, "with 0 holders is 0 times in the free list"),
        (lose_reference, "has 2 holders but counts 0 extra ones"),
        (count_one_too_many, "has 2 holders but counts 2 extra ones"),
        (keep_a_count_of_nothing, "counted as shared but has the count 0"),
        (free_too_early, "with 1 holders is 1 times in the free list"),
        (list_twice, "with 0 holders is 2 times in the free list"),
        (miscount, "the count says"),
        (list_null_block, "the null block is free, held or cached"),
        (cache_null_block, "the null block is free, held or cached"),
        (forget_hash, "hashes can be found"),
        (stale_hash, "carries another one"),
        (find_a_worthless_block, "waits to be found but has no hash"),
        (hide_a_findable_block, "has a hash but is in front of the queue"),
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
