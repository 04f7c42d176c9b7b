"""Attention over a paged KV cache, causal or not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostep.ops.reference.rounding import Float32Array, StorageDtype, round_to


def attend(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    positions: NDArray[Any],
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    causal: bool = True,
) -> Float32Array:
    """Attention of some query tokens of one sequence, in float64.

    Args:
        q: [T, Hq, D], already normed and rotated.
        k, v: [S, Hkv, D]; row s is position s. Query head h reads KV head ``h // (Hq / Hkv)``.
        positions: int [T]; the query at p sees keys 0..p, or p - window + 1..p.
        causal: False: every query sees all keys.

    Returns:
        float32 [T, Hq, D].
    """
    group = q.shape[1] // k.shape[1]
    # What no query sees is never read: blocks behind the window may belong to others by now.
    first = 0 if sliding_window is None else max(0, int(np.min(positions)) - sliding_window + 1)
    keys = np.repeat(np.asarray(k[first:], np.float64), group, axis=1)
    values = np.repeat(np.asarray(v[first:], np.float64), group, axis=1)
    scores = np.einsum("thd,shd->hts", np.asarray(q, np.float64), keys) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    key_positions = np.arange(first, k.shape[0])[None, :]
    query_positions = np.asarray(positions)[:, None]
    hidden = (key_positions > query_positions) & causal
    if sliding_window is not None:
        hidden |= key_positions <= query_positions - sliding_window
    scores = np.where(hidden[None], -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result: Float32Array = np.einsum("hts,shd->thd", weights, values).astype(np.float32)
    return result


def write_kv(
    cache: Float32Array,
    rows: NDArray[Any],
    block_table: NDArray[Any],
    positions: NDArray[Any],
    dtype: StorageDtype = "fp32",
) -> None:
    """Store the keys (or values) of one sequence's tokens.

    Args:
        cache: one layer's K or V, [num_blocks, block_size, Hkv, D]; written in place.
        rows: [T, Hkv, D]; rounded to ``dtype`` on the way in.
        block_table: block ids of the sequence, in order of position.
        positions: int [T].
    """
    block_size = cache.shape[1]
    blocks = np.asarray(block_table)[np.asarray(positions) // block_size]
    cache[blocks, np.asarray(positions) % block_size] = round_to(rows, dtype)


def gather_kv(cache: Float32Array, block_table: NDArray[Any], length: int) -> Float32Array:
    """The first ``length`` tokens of a sequence out of ``cache``: [length, Hkv, D]."""
    block_size = cache.shape[1]
    positions = np.arange(length)
    blocks = np.asarray(block_table)[positions // block_size]
    result: Float32Array = cache[blocks, positions % block_size]
    return result


def paged_attention(
    q: NDArray[Any],
    k_cache: Float32Array,
    v_cache: Float32Array,
    block_table: NDArray[Any],
    positions: NDArray[Any],
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    causal: bool = True,
) -> Float32Array:
    """:func:`attend` of one sequence whose KV lies in blocks; the cache holds the queries' own KV.

    Args:
        q: [T, Hq, D].
        k_cache, v_cache: [num_blocks, block_size, Hkv, D].
        block_table: block ids of the sequence, in order of position.
        positions: int [T], ascending.
    """
    length = int(np.asarray(positions)[-1]) + 1
    return attend(
        q,
        gather_kv(k_cache, block_table, length),
        gather_kv(v_cache, block_table, length),
        positions,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        causal=causal,
    )
