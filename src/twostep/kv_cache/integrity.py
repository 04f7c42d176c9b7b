"""Recompute what the KV planner knows from scratch and compare: finds leaks and double frees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from twostep.kv_cache.block import Block
from twostep.kv_cache.block_pool import BlockPool
from twostep.kv_cache.kv_cache_manager import KVCacheManager, KVRequest


def find_violations(
    manager: KVCacheManager, requests: Mapping[str, KVRequest] | None = None
) -> list[str]:
    """One line for each broken invariant, [] when all is well. Cost: all blocks, no shortcuts.

    ``requests``: the live ones by id; with them, holders and contents are compared too.
    """
    found = [
        *_wrong_references(manager),
        *_wrong_free_list(manager.pool),
        *_wrong_hash_map(manager.pool),
    ]
    if requests is not None:
        found += _wrong_holders(manager, requests)
    return found


def _wrong_references(manager: KVCacheManager) -> list[str]:
    null_block = manager.pool.null_block
    holders: Counter[int] = Counter()
    for table in manager._tables.values():
        holders.update(b.block_id for b in table.blocks if b is not null_block)
    for blocks in manager._parked.values():
        holders.update(b.block_id for b in blocks)
    found = [
        f"block {b.block_id} has ref_cnt {b.ref_cnt} but {holders[b.block_id]} holders"
        for b in manager.pool.blocks[1:]
        if b.ref_cnt != holders[b.block_id]
    ]
    if null_block.ref_cnt != 1 or null_block.block_hash is not None:
        found.append("the null block was counted or cached")
    return found


def _wrong_free_list(pool: BlockPool) -> list[str]:
    found: list[str] = []
    times_free = Counter(block.block_id for block in pool.free_queue)
    for block in pool.blocks[1:]:
        expected = 1 if block.ref_cnt == 0 else 0
        if times_free[block.block_id] != expected:
            found.append(
                f"block {block.block_id} with ref_cnt {block.ref_cnt} is "
                f"{times_free[block.block_id]} times in the free list"
            )
    if times_free[pool.null_block.block_id]:
        found.append("the null block is in the free list")
    if times_free.total() != pool.num_free_blocks:
        found.append(f"{times_free.total()} blocks are free, the count says {pool.num_free_blocks}")
    for block in pool.free_queue:
        if block.next_free is None or block.next_free.prev_free is not block:
            found.append(f"the free list is torn after block {block.block_id}")
    return found


def _wrong_hash_map(pool: BlockPool) -> list[str]:
    by_hash: dict[bytes, set[int]] = {}
    for block in pool.blocks:
        if block.block_hash is not None:
            by_hash.setdefault(block.block_hash, set()).add(block.block_id)
    mapped = {key: _ids_of(entry) for key, entry in pool.cached.items()}
    return [
        f"hash {key.hex()[:12]} maps to blocks {mapped.get(key)} but {by_hash.get(key)} carry it"
        for key in mapped.keys() | by_hash.keys()
        if mapped.get(key) != by_hash.get(key)
    ]


def _ids_of(entry: Block | dict[int, Block]) -> set[int]:
    return set(entry) if isinstance(entry, dict) else {entry.block_id}


def _wrong_holders(manager: KVCacheManager, requests: Mapping[str, KVRequest]) -> list[str]:
    found = [
        f"request {request_id} is gone but holds {len(table.blocks)} blocks"
        for request_id, table in manager._tables.items()
        if request_id not in requests
    ]
    for request_id, table in manager._tables.items():
        request = requests.get(request_id)
        if request is None:
            continue
        if len(table.blocks) * manager.block_size < request.num_computed_tokens:
            found.append(f"request {request_id} has more computed tokens than slots")
        for index, block in enumerate(table.blocks):
            if block.block_hash is None:
                continue
            hashes = request.block_hashes
            if index >= len(hashes) or hashes[index] != block.block_hash:
                found.append(
                    f"block {block.block_id} of request {request_id} has another's content"
                )
    return found
