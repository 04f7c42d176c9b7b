"""The KV cache is as large as needed, or as fits, and says which."""

from __future__ import annotations

import pytest

from twostep.contracts.errors import OutOfMemoryError
from twostep.kv_cache.sizing import KVCacheSizing, blocks_per_request, size_kv_cache

MIB = 1 << 20


def size(**changes: int | None) -> KVCacheSizing:
    """1 MiB blocks of 16 tokens, 1 GiB free, 4 requests of 1,000 tokens."""
    arguments: dict = {
        "block_bytes": MIB,
        "block_size": 16,
        "available_bytes": 1024 * MIB,
        "max_model_len": 1000,
        "max_num_seqs": 4,
    }
    return size_kv_cache(**(arguments | changes))


def test_need_that_fits() -> None:
    """63 blocks for each of 4 requests, and the null block; no more is reserved."""
    sizing = size()
    assert sizing.num_blocks == 4 * 63 + 1
    assert sizing.num_tokens == 4 * 63 * 16
    assert sizing.total_bytes == 253 * MIB
    assert sizing.max_concurrency == 4
    assert sizing.reason == "4 requests of 1000 tokens, all that can be needed"


def test_need_that_does_not_fit() -> None:
    """Everything that is free, and the reason says so."""
    sizing = size(available_bytes=100 * MIB + 5)
    assert sizing.num_blocks == 100
    assert sizing.reason == "all that fits in 100.0 MiB"


def test_own_size() -> None:
    """The user's size replaces the need."""
    sizing = size(requested_bytes=70 * MIB)
    assert sizing.num_blocks == 70
    assert sizing.reason == "70.0 MiB as requested"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"available_bytes": 50 * MIB}, r"1000 tokens needs 64.0 MiB .* set --max-model-len 784 "),
        ({"available_bytes": MIB}, "free some memory"),
        ({"available_bytes": 500}, "only 0 B can be had"),
        ({"requested_bytes": 50 * MIB}, "--max-model-len 784"),
        ({"requested_bytes": 5000 * MIB}, "should take 4.9 GiB but 1.0 GiB are free: ask for less"),
    ],
)
def test_too_little(changes: dict[str, int], words: str) -> None:
    """One line with what is needed, what there is, and what to do."""
    with pytest.raises(OutOfMemoryError, match=words) as caught:
        size(**changes)
    assert "\n" not in str(caught.value)


def test_suggested_length_works() -> None:
    """Taking the advice leads to a cache that fits."""
    with pytest.raises(OutOfMemoryError, match="784"):
        size(available_bytes=50 * MIB)
    assert size(available_bytes=50 * MIB, max_model_len=784).max_concurrency == 1


def test_window_bounds_the_need() -> None:
    """w=64, 2 x 8192 tokens in flight: 1029 blocks a request, however long it gets."""
    needed = blocks_per_request(
        block_size=16, max_model_len=131_072, sliding_window=64, max_in_flight_tokens=16_384
    )
    assert needed == 1029
    short = blocks_per_request(
        block_size=16, max_model_len=1000, sliding_window=64, max_in_flight_tokens=16_384
    )
    assert short == 63
