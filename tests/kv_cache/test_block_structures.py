"""The pool, its queue, hashes: order, and misuse is loud."""

from __future__ import annotations

import hashlib
import struct
import sys

import pytest

from twostep.kv_cache import block_hash as block_hash_module
from twostep.kv_cache.block_hash import (
    NONE_HASH,
    extend_block_hashes,
    hash_block_tokens,
    token_array,
)
from twostep.kv_cache.block_pool import BlockPool, ReusableBlocks


def test_reusable_blocks_queue() -> None:
    """Taken from the front, added at the tail, taken out in the middle."""
    queue = ReusableBlocks(8)
    queue.append([3, 1, 5, 2])
    assert queue.popleft(1) == [3]
    queue.remove(5)
    assert 5 not in queue
    assert 2 in queue
    assert queue.in_order() == [1, 2]
    queue.append([5])
    assert queue.in_order() == [1, 2, 5]
    assert queue.count == 3
    assert queue.popleft(3) == [1, 2, 5]
    assert queue.popleft(0) == []


def test_reusable_blocks_last_free_counts() -> None:
    """A block that was revived and freed again queues at the tail, whatever old entries say."""
    queue = ReusableBlocks(6)
    queue.append([1, 2, 3])
    queue.remove(1)
    queue.append([1])
    assert queue.in_order() == [2, 3, 1]
    assert queue.popleft(2) == [2, 3]
    assert queue.popleft(1) == [1]
    with pytest.raises(AssertionError, match="0 are here"):
        queue.popleft(1)


def test_reusable_blocks_forget_old_entries() -> None:
    """Reviving and freeing for ever needs no more room than the pool has blocks."""
    queue = ReusableBlocks(4)
    queue.append([1, 2, 3])
    for _ in range(100):
        queue.remove(2)
        queue.append([2])
        assert len(queue._entries) <= 2 * 4
    assert queue.in_order() == [1, 3, 2]
    assert queue.popleft(3) == [1, 3, 2]


def test_pool_misuse() -> None:
    """Double free of a findable block, a pool of nothing."""
    pool = BlockPool(4)
    (block_id,) = pool.get_new_blocks(1)
    assert pool.cache_blocks([block_id], [b"h"]) == [block_id]
    pool.free_blocks([block_id])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks([block_id])
    with pytest.raises(AssertionError, match="null block"):
        BlockPool(1)


def test_pool_order() -> None:
    """Worthless blocks first, then findable ones, longest free first; held ones lose nothing."""
    pool = BlockPool(8)
    taken = pool.get_new_blocks(5)
    assert taken == [1, 2, 3, 4, 5]
    pool.cache_blocks([1, 2], [b"1", b"2"])
    pool.free_blocks([5, 2, 4, 1])
    assert pool.free_order() == [5, 4, 6, 7, 2, 1]
    assert pool.get_new_blocks(5) == [5, 4, 6, 7, 2]
    assert pool.cached == {b"1": 1}
    assert pool.get_new_blocks(0) == []


def test_twins_are_not_offered() -> None:
    """One block for each content; the others are worthless once they are free."""
    pool = BlockPool(5)
    twins = pool.get_new_blocks(3)
    assert pool.cache_blocks(twins[:1], [b"h"]) == twins[:1]
    assert pool.cache_blocks(twins[1:], [b"h", b"i"]) == twins[2:]
    assert pool.cached == {b"h": twins[0], b"i": twins[2]}
    pool.free_blocks([twins[1]])
    assert pool.free_order()[0] == twins[1]
    pool.evict(twins[0])
    pool.evict(twins[0])
    assert pool.cached == {b"i": twins[2]}
    pool.evict_all()
    assert pool.cached == {}
    assert pool.hash_of == [None] * 5


def test_evicting_everything_keeps_the_order() -> None:
    """Free blocks are handed out as before, only their content is gone."""
    pool = BlockPool(5)
    pool.cache_blocks(pool.get_new_blocks(3), [b"1", b"2", b"3"])
    pool.free_blocks([2, 1])
    assert pool.free_order() == [4, 2, 1]
    pool.evict_all()
    assert pool.free_order() == [4, 2, 1]
    assert pool.reusable.count == 0


def test_hash_is_a_documented_encoding() -> None:
    """sha256 over parent, 32-bit little-endian ids, and length-prefixed keys."""
    ids = [1, 2, 128_000, 2**31]
    expected = hashlib.sha256(NONE_HASH + struct.pack("<4I", *ids)).digest()
    assert hash_block_tokens(None, ids) == expected
    salted = hashlib.sha256(
        NONE_HASH + struct.pack("<4I", *ids) + struct.pack("<I", 2) + b"ab"
    ).digest()
    assert hash_block_tokens(None, ids, ("ab",)) == salted
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_array(ids), 4, "ab")
    assert hashes == [salted]


def test_hash_is_the_same_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a big-endian machine the ids are swapped to little-endian first."""
    swapped = [int.from_bytes(i.to_bytes(4, "little"), "big") for i in (1, 2, 3, 4)]
    expected = hash_block_tokens(None, [1, 2, 3, 4])
    other = "big" if sys.byteorder == "little" else "little"
    monkeypatch.setattr(block_hash_module.sys, "byteorder", other)
    assert hash_block_tokens(None, swapped) == expected


def test_hashes_grow_with_the_tokens() -> None:
    """0..39 give two hashes; eight more tokens a third; the first two stay."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_array(range(40)), 16, "salt")
    assert len(hashes) == 2
    before = list(hashes)
    extend_block_hashes(hashes, token_array(range(47)), 16, "salt")
    assert hashes == before
    extend_block_hashes(hashes, token_array(range(48)), 16, "salt")
    at_once: list[bytes] = []
    extend_block_hashes(at_once, token_array(range(48)), 16, "salt")
    assert hashes == at_once
    assert len(hashes) == 3
