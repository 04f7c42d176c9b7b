"""Rules that hold between steps, recomputed from scratch: no counter of the engine is trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain, compress
from typing import Any

from twostep.contracts.outputs import SchedulerStats
from twostep.engine.core import EngineCore
from twostep.kv_cache.block_pool import NULL_BLOCK_ID
from twostep.kv_cache.kv_cache_manager import KVCacheManager
from twostep.scheduler.request import Request
from twostep.scheduler.scheduler import Scheduler
from twostep.sim.streams import Stream
from twostep.sim.violation import Violation


def check_blocks(kv: KVCacheManager, *, thoroughly: bool = False) -> None:
    """I1, I2: every block is held as often as is counted, or free exactly once.

    ``thoroughly``: the order of the free blocks, too, which takes a walk through the queue.
    """
    pool = kv.pool
    holdings = list(chain.from_iterable([table.block_ids for table in kv._tables.values()]))
    holdings += chain.from_iterable(kv._parked.values())
    held = set(holdings)
    extra: dict[int, int] = {}
    if len(held) < len(holdings):
        counts = Counter(holdings)
        extra = {block: n - 1 for block, n in counts.items() if n > 1 and block != NULL_BLOCK_ID}
    held.discard(NULL_BLOCK_ID)
    if extra != pool.extra_refs:
        raise Violation("I1", f"shared blocks: {extra} by holders, {pool.extra_refs} by count")
    free = [*pool.unhashed, *compress(range(pool.num_blocks), pool.reusable._is_free)]
    free_set = set(free)
    if not held.isdisjoint(free_set):
        both = sorted(held & free_set)
        raise Violation("I2", f"blocks {both} are held and free at the same time")
    if len(free_set) != len(free) or NULL_BLOCK_ID in free_set:
        raise Violation("I2", "a block is twice in the free list, or the null block is in it")
    if len(held) + len(free) != pool.num_blocks - 1 or len(free) != pool.num_free_blocks:
        lost = set(range(1, pool.num_blocks)) - held - free_set
        raise Violation("I2", f"blocks {sorted(lost)} are neither held nor free")
    if thoroughly and set(pool.free_order()) != free_set:
        raise Violation("I2", "the queue of free blocks does not hold the free blocks")


def check_cached_content(
    kv: KVCacheManager, block_values: Mapping[int, int], hash_of_value: Mapping[int, bytes]
) -> None:
    """I7: what can be found is there. ``block_values``: the device's KV, by block."""
    pool = kv.pool
    keys, blocks = list(pool.cached), list(pool.cached.values())
    if list(map(pool.hash_of.__getitem__, blocks)) != keys or (
        len(keys) + pool.hash_of.count(None) != pool.num_blocks
    ):
        raise Violation("I7", "the two directions of the hash map do not agree")
    if list(map(hash_of_value.get, map(block_values.get, blocks))) != keys:  # type: ignore[arg-type]
        wrong = [
            block
            for key, block in pool.cached.items()
            if hash_of_value.get(block_values.get(block, 0)) != key
        ]
        raise Violation("I7", f"blocks {wrong} do not hold what their hashes say")
    if any(map(pool.hash_of.__getitem__, pool.unhashed)):
        raise Violation("I7", "a findable block is in front of the free list")


def check_requests(
    scheduler: Scheduler, streams: Mapping[str, Stream], num_drafts: int, *, is_mid_step: bool
) -> None:
    """I8, I9: who runs and waits, and the counters of each request.

    ``num_drafts``: most drafts of one request that all steps in flight hold. ``is_mid_step``: an
    interrupt came between plan and result of a synchronous step, which counts no placeholders.
    """
    requests, running = scheduler.requests, scheduler.running
    waiting = list(scheduler.waiting)
    kv = scheduler.kv_cache_manager
    tables = kv._tables
    block_size = kv.block_size
    if len(running) > scheduler.config.max_num_seqs:
        raise Violation("I8", f"{len(running)} requests run")
    if len(running) + len(waiting) != len(requests):
        raise Violation("I3", "running and waiting requests are not the live requests")
    if len(tables) != len(running):
        raise Violation("I3", f"{len(running)} requests run, {len(tables)} hold blocks")
    for request in running:
        request_id = request.request_id
        known = request.num_tokens
        if len(streams[request_id].tokens) != known or len(request.all_token_ids) != known:
            _report_tokens(request, streams)
        if requests.get(request_id) is not request or request_id not in tables:
            raise Violation("I9", f"{request_id} runs without blocks, or is not live")
        placeholders = request.num_output_placeholders
        computed = request.num_computed_tokens
        known += placeholders
        if placeholders < 0 or computed > known + num_drafts * is_mid_step:
            raise Violation("I9", f"{request_id}: {computed} of {known}, {placeholders} to come")
        if computed != known - 1 and not request.is_prefill_chunk and not is_mid_step:
            raise Violation("I9", f"{request_id} decodes with {computed} computed of {known}")
        num_blocks = len(tables[request_id].block_ids)
        # Blocks may have been allocated ahead, for drafts that were refused.
        if num_blocks != -(-computed // block_size) and not (
            -(-computed // block_size) <= num_blocks <= -(-(computed + num_drafts) // block_size)
        ):
            raise Violation("I9", f"{request_id} has {num_blocks} blocks, {computed} computed")
    for request in waiting:
        known = request.num_tokens
        if len(streams[request.request_id].tokens) != known or len(request.all_token_ids) != known:
            _report_tokens(request, streams)
        if request.num_computed_tokens or request.num_output_placeholders:
            raise Violation("I9", f"{request.request_id} waits with computed tokens")
        if requests.get(request.request_id) is not request:
            raise Violation("I3", f"{request.request_id} waits, and is not live")


def _report_tokens(request: Request, streams: Mapping[str, Stream]) -> None:
    raise Violation(
        "I9",
        f"{request.request_id} has {request.num_tokens} tokens, "
        f"its client {len(streams[request.request_id].tokens)}",
    )


def check_stats(stats: SchedulerStats, scheduler: Scheduler) -> None:
    """I11: the counts that monitoring sees are those of the queues and the pool."""
    pool = scheduler.kv_cache_manager.pool
    usage = 1 - (len(pool.unhashed) + sum(pool.reusable._is_free)) / (pool.num_blocks - 1)
    told = (stats.num_running_reqs, stats.num_waiting_reqs)
    right = (len(scheduler.running), len(scheduler.waiting))
    if told != right or abs(stats.kv_cache_usage - usage) > 1e-9:
        raise Violation(
            "I11", f"told {told} and {stats.kv_cache_usage:.3f}, right are {right} and {usage:.3f}"
        )


def check_drained(core: EngineCore, request_ids: set[str]) -> None:
    """I3: nothing is left of these requests, in no attribute of core, scheduler or KV manager."""
    scheduler = core.scheduler
    kv = scheduler.kv_cache_manager
    if core.batch_queue or kv.pool.num_free_blocks != kv.pool.num_usable_blocks:
        raise Violation("I3", "steps are in flight or blocks are held after the drain")
    for owner in (core, scheduler, kv, scheduler.waiting):
        for name, value in _attributes(owner).items():
            if isinstance(value, (dict, set, frozenset, list)) or hasattr(value, "popleft"):
                left = [item for item in value if _names_request(item, request_ids)]
                if left:
                    raise Violation("I3", f"{type(owner).__name__}.{name} still holds {left[:3]}")
    for name in ("_tables", "_parked", "_published"):
        if getattr(kv, name, None):
            raise Violation("I3", f"KVCacheManager.{name} is not empty")


def _attributes(owner: object) -> dict[str, Any]:
    found = dict(getattr(owner, "__dict__", {}))
    for cls in type(owner).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(owner, name):
                found[name] = getattr(owner, name)
    return found


def _names_request(item: object, request_ids: set[str]) -> bool:
    if isinstance(item, Request):
        return True
    if isinstance(item, tuple):
        return any(_names_request(part, request_ids) for part in item)
    return isinstance(item, str) and item in request_ids
