"""The native op that norms, rotates and stores q, k and v, against the NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from twostep.config.model import RopeConfig
from twostep.ops.reference.attention import attend
from twostep.ops.reference.norm import rms_norm
from twostep.ops.reference.rope import apply_rope, rope_tables

native = pytest.importorskip("twostep._native")
pytestmark = pytest.mark.native

ISAS = native.cpu_info()["isas"]
NO_INTS = np.zeros(0, np.int32)
LOG2E = np.log2(np.e)
MAX_POSITION = 4096
HEADS, KV_HEADS = 4, 2


class RopeMachine:
    """Rotates, then attends in float32."""

    def __init__(
        self, isa: str, head_dim: int, tables: tuple[Any, Any], *,
        num_threads: int = 1, sliding_window: int = 32, in_attention: bool = False, **spec: Any,
    ) -> None:  # fmt: skip
        self.device = native.make_device(isa)
        self.head_dim = head_dim
        width = HEADS * head_dim
        cache = native.KVCache(self.device, 1, KV_HEADS, head_dim, 280, dtype="fp32")
        self.qkv = native.Rows(width + 2 * KV_HEADS * head_dim, 64)
        self.q, self.out = native.Rows(width, 64), native.Rows(width, 64)
        self.plan = native.Plan()
        rope = native.add_rope_cache(
            self.plan, self.device, cache, 0, self.qkv, None if in_attention else self.q,
            native.RopeTable(*tables), num_heads=HEADS, scale=head_dim**-0.5, **spec,
        )  # fmt: skip
        native.add_attention(
            self.plan, self.device, cache, 0, None if in_attention else self.q,
            rope=rope if in_attention else None, num_heads=HEADS, num_threads=num_threads,
            rows=self.out, sliding_window=sliding_window,
        )  # fmt: skip
        self.stream = native.Stream(num_threads)

    def run(
        self, qkv: np.ndarray, start: int, num_cached: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """q and the attention output, [T, HEADS, D], of T tokens from position `start`.

        Keys and values of positions below `num_cached` are not written.
        """
        count = len(qkv)
        self.qkv.numpy()[:count] = qkv
        blocks = (start + count + 15) // 16
        step = native.make_step(
            self.device, count, np.asarray([0, count], np.int32),
            np.asarray([start + count], np.int32), np.zeros(1, np.int32), NO_INTS, NO_INTS,
            np.arange(1, blocks + 1, dtype=np.int32)[None], 16,
        )  # fmt: skip
        if num_cached:
            step.keep_cached(0, num_cached)
        self.stream.wait(self.stream.launch(self.plan, step))
        shape = count, HEADS, self.head_dim
        q, out = (rows.numpy()[:count].reshape(shape) for rows in (self.q, self.out))
        return q / (LOG2E * self.head_dim**-0.5), out.copy()

    def decode(self, qkv: np.ndarray, blocks: np.ndarray, length: int) -> np.ndarray:
        """Attention of one token of each of len(qkv) requests, each `length` long with it."""
        count = len(qkv)
        self.qkv.numpy()[:count] = qkv
        step = native.make_step(
            self.device, count, np.arange(count + 1, dtype=np.int32),
            np.full(count, length, np.int32), np.arange(count, dtype=np.int32), NO_INTS, NO_INTS,
            blocks, 16,
        )  # fmt: skip
        self.stream.wait(self.stream.launch(self.plan, step))
        return self.out.numpy()[:count].copy()


def random_qkv(count: int, head_dim: int, seed: int) -> np.ndarray:
    width = (HEADS + 2 * KV_HEADS) * head_dim
    return np.random.default_rng(seed).standard_normal((count, width), np.float32)


def check(
    machine: RopeMachine, tables: tuple[Any, Any], start: int, *,
    interleaved: bool = False, weights: tuple[Any, Any] | None = None,
) -> None:  # fmt: skip
    """Two steps: the window of the second reaches into the first."""
    d = machine.head_dim
    qkv = random_qkv(24, d, seed=start + d)
    outputs = [machine.run(qkv[:20], start), machine.run(qkv[20:], start + 20)]
    q, k, v = np.split(qkv.reshape(24, -1, d), [HEADS, HEADS + KV_HEADS], 1)
    if weights:
        q, k = rms_norm(q, weights[0], 1e-5), rms_norm(k, weights[1], 1e-5)
    cos, sin = (table[start : start + 24] for table in tables)
    q, k = (apply_rope(x, cos, sin, interleaved=interleaved) for x in (q, k))
    np.testing.assert_allclose(np.concatenate([o[0] for o in outputs]), q, rtol=0, atol=5e-6)
    # Before `start` the cache is empty: keys and values are zero there, within the window too.
    before = min(start, 32)
    zeros = np.zeros((before, KV_HEADS, d), np.float32)
    want = attend(
        q, np.concatenate([zeros, k]), np.concatenate([zeros, v]),
        np.arange(before, before + 24), scale=d**-0.5, sliding_window=32,
    )  # fmt: skip
    np.testing.assert_allclose(np.concatenate([o[1] for o in outputs]), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(16, 16), (64, 64), (80, 80), (64, 32), (80, 20), (96, 6), (128, 90), (32, 2)],
)
@pytest.mark.parametrize("start", [0, 4000])
def test_pairings_and_partial_rotation(
    isa: str, interleaved: bool, head_dim: int, rotary_dim: int, start: int
) -> None:
    tables = rope_tables(RopeConfig(theta=10000.0, rotary_dim=rotary_dim), MAX_POSITION)
    machine = RopeMachine(isa, head_dim, tables, interleaved=interleaved)
    check(machine, tables, start, interleaved=interleaved)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_norm_of_q_and_k(isa: str, interleaved: bool, head_dim: int) -> None:
    tables = rope_tables(RopeConfig(theta=10000.0, rotary_dim=head_dim), MAX_POSITION)
    rng = np.random.default_rng(1)
    weights = tuple(rng.uniform(0.5, 1.5, head_dim).astype(np.float32) for _ in "qk")
    machine = RopeMachine(
        isa, head_dim, tables, interleaved=interleaved, num_threads=2,
        q_norm=native.Vector(weights[0]), k_norm=native.Vector(weights[1]), norm_eps=1e-5,
    )  # fmt: skip
    check(machine, tables, 100, interleaved=interleaved, weights=weights)


@pytest.mark.parametrize("isa", ISAS)
def test_rotation_does_not_depend_on_the_batch(isa: str) -> None:
    tables = rope_tables(RopeConfig(theta=10000.0, rotary_dim=64), MAX_POSITION)
    qkv = random_qkv(21, 64, seed=3)
    together = RopeMachine(isa, 64, tables).run(qkv, 0)[0]
    machine = RopeMachine(isa, 64, tables)
    alone = np.concatenate([machine.run(qkv[i : i + 1], i)[0] for i in range(21)])
    np.testing.assert_array_equal(together, alone)


def test_a_position_beyond_the_table_is_refused() -> None:
    tables = rope_tables(RopeConfig(theta=10000.0, rotary_dim=32), 40)
    machine = RopeMachine(ISAS[0], 32, tables)
    machine.run(random_qkv(20, 32, seed=1), 20)
    with pytest.raises(ValueError, match="position 40 is beyond the rope table of 40 positions"):
        machine.run(random_qkv(20, 32, seed=1), 21)


def test_tables_that_differ_or_are_too_wide_are_refused() -> None:
    wide = np.ones((8, 17), np.float32)
    with pytest.raises(ValueError, match="cos and sin differ in shape"):
        native.RopeTable(wide, wide[:, :16].copy())
    with pytest.raises(ValueError, match="the rope table is wider than head_dim"):
        RopeMachine(ISAS[0], 32, (wide, wide))


def test_a_norm_of_another_width_is_refused() -> None:
    tables = rope_tables(RopeConfig(theta=10000.0, rotary_dim=32), 40)
    with pytest.raises(ValueError, match="q_norm or k_norm is not head_dim wide"):
        RopeMachine(ISAS[0], 32, tables, q_norm=native.Vector(np.ones(16, np.float32)))


@pytest.mark.parametrize("isa", ISAS)
def test_cached_positions_are_read_and_not_written(isa: str) -> None:
    """The last token of a prompt that is cached as a whole: its query is new, its KV stays."""
    tables = rope_tables(RopeConfig(theta=10000.0, rotary_dim=32), MAX_POSITION)
    kept, written = RopeMachine(isa, 32, tables), RopeMachine(isa, 32, tables)
    first, second = random_qkv(16, 32, seed=1), random_qkv(16, 32, seed=2)
    for machine in (kept, written):
        machine.run(first, 0)
    again = second[15:].copy()
    again[:, HEADS * 32 :] = first[15:, HEADS * 32 :]  # its own query, the cached key and value
    want = written.run(again, 15)
    got = kept.run(second[15:], 15, num_cached=16)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(kept.run(second[:1], 16)[1], written.run(second[:1], 16)[1])
    with pytest.raises(IndexError, match="no such request"):
        native.make_step(
            kept.device, 1, np.asarray([0, 1], np.int32), np.ones(1, np.int32),
            np.zeros(1, np.int32), NO_INTS, NO_INTS, np.ones((1, 1), np.int32), 16,
        ).keep_cached(1, 1)  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sliding_window", [0, 32])
def test_queries_rotated_in_attention_give_the_bytes_of_two_ops(
    isa: str, interleaved: bool, sliding_window: int
) -> None:
    """Chunks of a prompt, in tiles of several tokens; at the end its segments are spread out."""
    tables = rope_tables(RopeConfig(theta=10000.0, rotary_dim=48), MAX_POSITION)
    weights = [native.Vector(np.linspace(0.5, 1.5, 64, dtype=np.float32)) for _ in "qk"]
    apart, inside = (
        RopeMachine(
            isa, 64, tables, num_threads=2, sliding_window=sliding_window,
            in_attention=in_attention, interleaved=interleaved, q_norm=weights[0],
            k_norm=weights[1], norm_eps=1e-5,
        )
        for in_attention in (False, True)
    )  # fmt: skip
    start = 0
    for count in [64, 2, 13, *[64] * 10]:
        qkv = random_qkv(count, 64, seed=start)
        (_, want), (_, got) = (machine.run(qkv, start) for machine in (apart, inside))
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
        start += count


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sliding_window", [0, 32])
@pytest.mark.parametrize(("num_reqs", "length"), [(1, 700), (5, 90), (40, 40)])
def test_lone_tokens_rotated_in_attention_give_the_bytes_of_two_ops(
    isa: str, sliding_window: int, num_reqs: int, length: int
) -> None:
    """One request has its segments spread over the threads, many have a task per KV head."""
    tables = rope_tables(RopeConfig(theta=10000.0, rotary_dim=64), MAX_POSITION)
    rng = np.random.default_rng(num_reqs)
    weights = [native.Vector(rng.uniform(0.5, 1.5, 64).astype(np.float32)) for _ in "qk"]
    apart, inside = (
        RopeMachine(
            isa, 64, tables, num_threads=2, sliding_window=sliding_window,
            in_attention=in_attention, q_norm=weights[0], k_norm=weights[1], norm_eps=1e-5,
        )
        for in_attention in (False, True)
    )  # fmt: skip
    table = 1 + rng.permutation(num_reqs * -(-length // 16)).astype(np.int32).reshape(num_reqs, -1)
    for position in range(length):
        qkv = random_qkv(num_reqs, 64, seed=position)
        want, got = (machine.decode(qkv, table, position + 1) for machine in (apart, inside))
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
