"""Blocks, the free queue, the pool, hashes: misuse is loud."""

from __future__ import annotations

import hashlib
import struct
import sys

import pytest

from twostep.kv_cache import block_hash as block_hash_module
from twostep.kv_cache.block import Block
from twostep.kv_cache.block_hash import NONE_HASH, extend_block_hashes, hash_block_tokens
from twostep.kv_cache.block_pool import BlockPool
from twostep.kv_cache.free_block_queue import FreeBlockQueue


def test_repr_names_the_block() -> None:
    """What a failed assertion shows."""
    assert repr(Block(7)) == "Block(7, ref_cnt=0, hashed=False)"


def test_queue_order() -> None:
    """popleft from the front, append at the tail, prepend in front, removal in the middle."""
    blocks = [Block(i) for i in range(6)]
    queue = FreeBlockQueue(blocks[:4])
    assert queue.popleft(2) == blocks[:2]
    queue.append([blocks[4]])
    queue.prepend([blocks[5], blocks[0]])
    assert list(queue) == [blocks[i] for i in (5, 0, 2, 3, 4)]
    queue.remove(blocks[3])
    assert list(queue) == [blocks[i] for i in (5, 0, 2, 4)]
    assert queue.num_free_blocks == 4
    assert queue.popleft(0) == []


def test_queue_misuse() -> None:
    """Removing what is not there, adding twice, taking too many."""
    blocks = [Block(i) for i in range(3)]
    queue = FreeBlockQueue(blocks[:2])
    with pytest.raises(AssertionError, match="not free"):
        queue.remove(blocks[2])
    with pytest.raises(AssertionError, match="already free"):
        queue.append([blocks[0]])
    with pytest.raises(AssertionError, match="more blocks"):
        queue.popleft(3)


def test_pool_misuse() -> None:
    """Double free, double publication, a pool of nothing."""
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"h")
    with pytest.raises(AssertionError, match="cached already"):
        pool.cache_block(block, b"i")
    pool.free_blocks([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks([block])
    with pytest.raises(AssertionError, match="null block"):
        BlockPool(1)


def test_pool_with_three_twins() -> None:
    """All twins are found one after another; evicting twice is harmless."""
    pool = BlockPool(5)
    twins = pool.get_new_blocks(3)
    for twin in twins:
        pool.cache_block(twin, b"h")
    for twin in twins:
        assert pool.get_cached_block(b"h") is twin
        pool.evict(twin)
        pool.evict(twin)
    assert pool.cached == {}
    pool.cache_block(twins[0], b"x")
    pool.evict_all()
    assert twins[0].block_hash is None


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
    extend_block_hashes(hashes, ids, 4, "ab")
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
    extend_block_hashes(hashes, list(range(40)), 16, "salt")
    assert len(hashes) == 2
    before = list(hashes)
    extend_block_hashes(hashes, list(range(47)), 16, "salt")
    assert hashes == before
    extend_block_hashes(hashes, list(range(48)), 16, "salt")
    at_once: list[bytes] = []
    extend_block_hashes(at_once, list(range(48)), 16, "salt")
    assert hashes == at_once
    assert len(hashes) == 3
