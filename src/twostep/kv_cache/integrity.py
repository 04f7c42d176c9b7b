"""Recompute what the KV planner knows from scratch and compare: finds leaks and double frees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from twostep.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from twostep.kv_cache.kv_cache_manager import KVCacheManager, KVRequest


def find_violations(
    manager: KVCacheManager, requests: Mapping[str, KVRequest] | None = None
) -> list[str]:
    """One line for each broken invariant, [] when all is well. Cost: all blocks, no shortcuts.

    ``requests``: the live ones by id; with them, holders and contents are compared too.
    """
    found = [*_wrong_references(manager), *_wrong_hash_map(manager.pool)]
    if requests is not None:
        found += _wrong_holders(manager, requests)
    return found


def _wrong_references(manager: KVCacheManager) -> list[str]:
    """Every block is free exactly once or held, and shared ones are counted right."""
    pool = manager.pool
    holders: Counter[int] = Counter()
    for table in manager._tables.values():
        holders.update(b for b in table.block_ids if b != NULL_BLOCK_ID)
    for blocks in manager._parked.values():
        holders.update(blocks)
    times_free = Counter(pool.free_order())
    found = []
    for block_id in range(1, pool.num_blocks):
        held, free = holders[block_id], times_free[block_id]
        if free != (0 if held else 1):
            found.append(f"block {block_id} with {held} holders is {free} times in the free list")
        extra = pool.extra_refs.get(block_id, 0)
        if extra != max(0, held - 1):
            found.append(f"block {block_id} has {held} holders but counts {extra} extra ones")
    if times_free[NULL_BLOCK_ID] or pool.hash_of[NULL_BLOCK_ID] or holders[NULL_BLOCK_ID]:
        found.append("the null block is free, held or cached")
    if times_free.total() != pool.num_free_blocks:
        found.append(f"{times_free.total()} blocks are free, the count says {pool.num_free_blocks}")
    found += [
        f"block {block_id} is counted as shared but has the count {count}"
        for block_id, count in pool.extra_refs.items()
        if count < 1
    ]
    return found


def _wrong_hash_map(pool: BlockPool) -> list[str]:
    found = [
        f"hash {key.hex()[:12]} maps to block {block_id}, which carries another one"
        for key, block_id in pool.cached.items()
        if pool.hash_of[block_id] != key
    ]
    hashed = {block_id for block_id, key in enumerate(pool.hash_of) if key is not None}
    if len(pool.cached) != len(hashed):
        found.append(f"{len(pool.cached)} hashes can be found, {len(hashed)} blocks have one")
    found += [
        f"free block {block_id} waits to be found but has no hash"
        for block_id in pool.reusable.in_order()
        if block_id not in hashed
    ]
    found += [
        f"free block {block_id} has a hash but is in front of the queue"
        for block_id in pool.unhashed
        if block_id in hashed
    ]
    return found


def _wrong_holders(manager: KVCacheManager, requests: Mapping[str, KVRequest]) -> list[str]:
    found = [
        f"request {request_id} is gone but holds {len(table.block_ids)} blocks"
        for request_id, table in manager._tables.items()
        if request_id not in requests
    ]
    for request_id, table in manager._tables.items():
        request = requests.get(request_id)
        if request is None:
            continue
        if len(table.block_ids) * manager.block_size < request.num_computed_tokens:
            found.append(f"request {request_id} has more computed tokens than slots")
        hashes = request.block_hashes
        for index, block_id in enumerate(table.block_ids):
            block_hash = manager.pool.hash_of[block_id]
            if block_hash is None:
                continue
            if index >= len(hashes) or hashes[index] != block_hash:
                found.append(f"block {block_id} of request {request_id} has another's content")
    return found
