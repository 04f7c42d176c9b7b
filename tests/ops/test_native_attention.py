"""Native paged attention against the NumPy reference, and its promise of equal bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from twostep.ops.reference.attention import attend
from twostep.ops.reference.rounding import StorageDtype, round_to

native = pytest.importorskip("twostep._native")
pytestmark = pytest.mark.native

ISAS = native.cpu_info()["isas"]
DTYPES: list[StorageDtype] = ["bf16", "fp16", "fp32"]
NO_INTS = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """What one attention layer is like."""

    isa: str = ISAS[0]
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 32
    window: int = 0
    softcap: float = 0.0
    dtype: StorageDtype = "fp32"
    scale: float = 0.17
    causal: bool = True

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def tolerance(self) -> float:
        """AVX-512 multiplies bf16 by bf16: queries and weights are rounded as well."""
        return 1.5e-2 if self.isa in ("avx512", "amx") and self.dtype == "bf16" else 2e-5


class Sequence:
    """A request: its qkv rows and its block table."""

    def __init__(self, layer: Layer, length: int, blocks: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.qkv = rng.standard_normal((length, layer.qkv_width), np.float32)
        self.blocks = blocks

    def expected(self, layer: Layer, count: int) -> np.ndarray:
        """Attention of the first `count` tokens, [count, heads * head_dim]."""
        d = layer.head_dim
        q, k, v = np.split(
            self.qkv[:count].reshape(count, -1, d), [layer.heads, layer.heads + layer.kv_heads], 1
        )
        return attend(
            q,
            round_to(k, layer.dtype),
            round_to(v, layer.dtype),
            np.arange(count),
            scale=layer.scale,
            sliding_window=layer.window or None,
            softcap=layer.softcap,
            causal=layer.causal,
        ).reshape(count, -1)


class Machine:
    """A cache and a recorded layer; runs steps of (sequence, number of its tokens)."""

    def __init__(
        self, layer: Layer, *, num_threads: int = 1, num_blocks: int = 64, max_tokens: int = 512,
        acts: tuple[Any, ...] = (), keep_rows: bool = True,
    ) -> None:  # fmt: skip
        self.layer = layer
        self.device = native.make_device(layer.isa)
        self.cache = native.KVCache(
            self.device, 2, layer.kv_heads, layer.head_dim, num_blocks, dtype=layer.dtype
        )
        self.qkv = native.Rows(layer.qkv_width, max_tokens)
        self.q = native.Rows(layer.width, max_tokens)
        self.out = native.Rows(layer.width, max_tokens)
        self.acts = [native.ActBuffer(form, layer.width, max_tokens) for form in acts]
        flat = np.ones((8192, 1), np.float32), np.zeros((8192, 1), np.float32)
        self.plan = native.Plan()
        native.add_rope_cache(
            self.plan, self.device, self.cache, 1, self.qkv, self.q, native.RopeTable(*flat),
            num_heads=layer.heads, scale=layer.scale, softcap=layer.softcap,
        )  # fmt: skip
        native.add_attention(
            self.plan, self.device, self.cache, 1, self.q,
            num_heads=layer.heads, num_threads=num_threads,
            sliding_window=layer.window, softcap=layer.softcap,
            **({} if layer.causal else {"causal": False}),
            rows=self.out if keep_rows else None, acts=self.acts,
        )  # fmt: skip
        self.stream = native.Stream(num_threads)
        self.computed: dict[Sequence, int] = {}
        self.step: Any = None

    def run(self, batch: list[tuple[Sequence, int]]) -> list[np.ndarray]:
        """One step; the new rows of each sequence."""
        counts = [count for _, count in batch]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lens = [self.computed.get(sequence, 0) + count for sequence, count in batch]
        table = np.zeros((len(batch), max(len(s.blocks) for s, _ in batch)), np.int32)
        for i, (sequence, count) in enumerate(batch):
            table[i, : len(sequence.blocks)] = sequence.blocks
            new = sequence.qkv[lens[i] - count : lens[i]]
            self.qkv.numpy()[starts[i] : starts[i + 1]] = new
            self.computed[sequence] = lens[i]
        self.step = native.make_step(
            self.device, int(starts[-1]), starts, np.asarray(lens, np.int32),
            np.arange(len(batch), dtype=np.int32), NO_INTS, NO_INTS, table, 16,
        )  # fmt: skip
        self.stream.wait(self.stream.launch(self.plan, self.step))
        out = self.out.numpy()
        return [out[starts[i] : starts[i + 1]].copy() for i in range(len(batch))]

    def run_all(self, sequence: Sequence, chunks: list[int]) -> np.ndarray:
        return np.concatenate([self.run([(sequence, count)])[0] for count in chunks])


def chunks_of(size: int, total: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def assert_same_bytes(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def check_values(layer: Layer, got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=layer.tolerance)


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 256])
def test_head_dims(isa: str, dtype: StorageDtype, head_dim: int) -> None:
    layer = Layer(isa=isa, dtype=dtype, head_dim=head_dim, scale=head_dim**-0.5)
    sequence = Sequence(layer, 53, [5, 2, 9, 3], seed=head_dim)
    got = Machine(layer).run_all(sequence, [37, 15, 1])
    check_values(layer, got, sequence.expected(layer, 53))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 2), (9, 3), (8, 2), (8, 1), (7, 7), (20, 1), (26, 2)]
)
def test_grouped_heads(isa: str, dtype: StorageDtype, heads: int, kv_heads: int) -> None:
    layer = Layer(isa=isa, dtype=dtype, heads=heads, kv_heads=kv_heads)
    sequence = Sequence(layer, 41, [1, 2, 3], seed=heads)
    got = Machine(layer).run_all(sequence, [17, 22, 1, 1])
    check_values(layer, got, sequence.expected(layer, 41))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 16, 17, 100, 256, 300, 1000])
def test_sliding_windows(isa: str, dtype: StorageDtype, window: int) -> None:
    layer = Layer(isa=isa, dtype=dtype, window=window)
    sequence = Sequence(layer, 600, list(range(1, 39)), seed=window)
    got = Machine(layer).run_all(sequence, [299, 300, 1])
    check_values(layer, got, sequence.expected(layer, 600))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap(isa: str, softcap: float) -> None:
    layer = Layer(isa=isa, softcap=softcap, scale=2.0)
    sequence = Sequence(layer, 50, [3, 1, 2, 5], seed=1)
    got = Machine(layer).run_all(sequence, [49, 1])
    check_values(layer, got, sequence.expected(layer, 50))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 255, 256, 257, 511])
def test_without_a_causal_mask_every_token_sees_the_whole_text(
    isa: str, dtype: StorageDtype, length: int
) -> None:
    layer = Layer(isa=isa, dtype=dtype, heads=4, kv_heads=2, causal=False)
    sequence = Sequence(layer, length, list(range(1, 34)), seed=length)
    got = Machine(layer, num_threads=2).run_all(sequence, [length])
    check_values(layer, got, sequence.expected(layer, length))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_causal_mask_a_text_is_the_same_beside_others(
    isa: str, dtype: StorageDtype
) -> None:
    layer = Layer(isa=isa, dtype=dtype, heads=4, kv_heads=4, head_dim=16, causal=False)
    texts = [Sequence(layer, n, [], seed=n) for n in (300, 1, 17, 64)]
    first = 1
    for text in texts:
        count = -(-len(text.qkv) // 16)
        text.blocks = list(range(first, first + count))
        first += count
    alone = [Machine(layer).run([(text, len(text.qkv))])[0] for text in texts]
    together = Machine(layer, num_threads=2).run([(text, len(text.qkv)) for text in texts])
    for a, b in zip(alone, together, strict=True):
        assert_same_bytes(a, b)


def test_without_a_causal_mask_a_part_of_a_text_is_refused() -> None:
    layer = Layer(causal=False)
    sequence = Sequence(layer, 40, [1, 2, 3], seed=1)
    machine = Machine(layer)
    machine.run([(sequence, 20)])
    with pytest.raises(ValueError, match="must be in one step"):
        machine.run([(sequence, 20)])


@pytest.mark.parametrize("isa", ISAS)
def test_long_context_with_a_permuted_block_table(isa: str) -> None:
    layer = Layer(isa=isa, heads=2, head_dim=16, dtype="bf16", scale=0.25)
    blocks = [int(b) for b in np.random.default_rng(0).permutation(np.arange(1, 190))]
    sequence = Sequence(layer, 3000, blocks, seed=2)
    machine = Machine(layer, num_threads=2, num_blocks=190, max_tokens=1500)
    got = machine.run_all(sequence, [1499, 1490, 10, 1])
    check_values(layer, got, sequence.expected(layer, 3000))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_and_decode_mixed_in_one_step(isa: str, dtype: StorageDtype) -> None:
    layer = Layer(isa=isa, dtype=dtype, heads=6, kv_heads=2)
    a = Sequence(layer, 300, list(range(1, 20)), seed=1)
    b = Sequence(layer, 90, list(range(30, 36)), seed=2)
    c = Sequence(layer, 40, [63, 50, 62], seed=3)
    machine = Machine(layer, num_threads=2)
    first = machine.run([(a, 299), (b, 30)])
    second = machine.run([(b, 60), (a, 1), (c, 40)])
    check_values(layer, np.concatenate([first[0], second[1]]), a.expected(layer, 300))
    check_values(layer, np.concatenate([first[1], second[0]]), b.expected(layer, 90))
    check_values(layer, second[2], c.expected(layer, 40))


# --- isolation -------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 39])
def test_nan_in_stale_slots_is_never_seen(isa: str, dtype: StorageDtype, length: int) -> None:
    layer = Layer(isa=isa, dtype=dtype)
    sequence = Sequence(layer, length, [4, 2, 3], seed=length)
    clean = Machine(layer).run_all(sequence, [length])
    dirty = Machine(layer)
    broken = Sequence(layer, 48, [4, 2, 3], seed=0)
    broken.qkv[:] = np.nan
    dirty.run_all(broken, [48])
    assert_same_bytes(dirty.run_all(sequence, [length]), clean)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_the_rows_that_see_it_and_no_other(isa: str, dtype: StorageDtype) -> None:
    layer = Layer(isa=isa, dtype=dtype, window=20)
    a = Sequence(layer, 60, [1, 2, 3, 4], seed=1)
    b = Sequence(layer, 60, [5, 6, 7, 8], seed=2)
    clean = Machine(layer).run([(a, 60), (b, 60)])
    k_of_token_21, v_of_token_30 = layer.heads * layer.head_dim, -1
    a.qkv[21, k_of_token_21] = np.nan
    a.qkv[30, v_of_token_30] = np.nan
    got = Machine(layer).run([(a, 60), (b, 60)])
    assert_same_bytes(got[1], clean[1])
    for position in range(60):
        if 21 <= position < 41:
            assert np.isnan(got[0][position]).all()
        elif 41 <= position < 50:
            assert np.isnan(got[0][position]).any()
        else:
            assert_same_bytes(got[0][position], clean[0][position])


@pytest.mark.parametrize("isa", ISAS)
def test_infinite_scores_end_in_nan(isa: str) -> None:
    layer = Layer(isa=isa)
    sequence = Sequence(layer, 20, [1, 2], seed=1)
    sequence.qkv[7, layer.width] = np.inf
    got = Machine(layer).run_all(sequence, [20])
    assert np.isfinite(got[:7]).all()
    assert np.isnan(got[7:]).any(axis=1).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [0, 40, 300])
def test_what_is_fetched_ahead_is_what_tokens_alone_read(isa: str, window: int) -> None:
    """Layer 1 of 2; a prompt in the same step is left out."""
    layer = Layer(isa=isa, heads=4, kv_heads=2, window=window, dtype="bf16")
    machine = Machine(layer, num_threads=2, num_blocks=96)
    near = Sequence(layer, 21, [40, 3], seed=1)
    far = Sequence(layer, 530, list(range(95, 61, -1)), seed=2)
    prompt = Sequence(layer, 2, [9], seed=3)
    machine.run([(near, 20)])
    machine.run_all(far, [300, 229])
    machine.run([(near, 1), (far, 1), (prompt, 2)])
    head = 16 * layer.head_dim * 2
    block = layer.kv_heads * head
    want = set[int]()
    for sequence, length in ((near, 21), (far, 530)):
        first = max(0, length - window) if window else 0
        for number in range(first // 16, (length + 15) // 16):
            neighbours, i = divmod(sequence.blocks[number], 32)
            for pool in (2, 3):  # keys and values of layer 1
                start = (neighbours * 4 + pool) * 32 * block + i * block
                want |= set(range(start, start + block, 64))
    attention = machine.plan.op_names().index("attention")
    got = machine.cache.read_ahead(machine.plan, attention, machine.step)
    lines = [line for start, count in got for line in range(start, start + count, 64)]
    assert sorted(lines) == sorted(want)
    assert machine.cache.read_ahead(machine.plan, attention - 1, machine.step) == []


@pytest.mark.parametrize("isa", ISAS)
def test_blocks_behind_the_window_are_never_read(isa: str) -> None:
    layer = Layer(isa=isa, window=24)
    sequence = Sequence(layer, 101, list(range(1, 8)), seed=1)
    clean = Machine(layer).run_all(sequence, [100, 1])[-1]
    machine = Machine(layer)
    machine.run_all(sequence, [100])
    null = Sequence(layer, 16, [0], seed=0)
    null.qkv[:] = np.nan
    machine.run_all(null, [16])
    sequence.blocks[:4] = [0] * 4  # the query at 100 sees 77..100, blocks 4..6
    assert_same_bytes(machine.run_all(sequence, [1])[0], clean)


# --- same request, same bytes ----------------------------------------------------------------

BITWISE = [
    Layer(isa=isa, dtype=dtype, window=window, heads=heads, softcap=softcap, head_dim=head_dim)
    for isa in ISAS
    for dtype, window, heads, softcap, head_dim in [
        ("bf16", 0, 3, 0.0, 64), ("fp16", 0, 3, 0.0, 32), ("fp32", 70, 8, 0.0, 16),
        ("bf16", 300, 1, 0.0, 80), ("fp16", 0, 2, 30.0, 16),
    ]
]  # fmt: skip


@pytest.mark.parametrize("layer", BITWISE, ids=str)
def test_bytes_do_not_depend_on_chunks_threads_or_blocks(layer: Layer) -> None:
    total = 540
    whole = Machine(layer, max_tokens=600).run_all(
        Sequence(layer, total, list(range(1, 36)), seed=3), [total]
    )
    for size, num_threads in [(1, 2), (7, 1), (16, 2), (33, 2)]:
        blocks = [int(b) for b in np.random.default_rng(size).permutation(np.arange(1, 60))]
        sequence = Sequence(layer, total, blocks, seed=3)
        machine = Machine(layer, num_threads=num_threads)
        assert_same_bytes(machine.run_all(sequence, chunks_of(size, total)), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_bytes_do_not_depend_on_the_batch(isa: str, num_threads: int) -> None:
    layer = Layer(isa=isa, heads=4, kv_heads=2, dtype="bf16")
    alone = Machine(layer, max_tokens=600).run_all(
        Sequence(layer, 530, list(range(1, 35)), seed=3), [530]
    )
    machine = Machine(layer, num_threads=num_threads, num_blocks=256, max_tokens=600)
    sequence = Sequence(layer, 530, list(range(40, 74)), seed=3)
    others = [Sequence(layer, 40, [80 + 3 * i, 81 + 3 * i, 82 + 3 * i], seed=9) for i in range(20)]
    pieces = []
    for step, count in enumerate([100, 3, 400, 1, 25, 1]):
        batch = [(other, 1 + step) for other in others[: 4 * step]]
        batch.insert(len(batch) // 2, (sequence, count))
        pieces.append(machine.run(batch)[len(batch) // 2])
    assert_same_bytes(np.concatenate(pieces), alone)


@pytest.mark.parametrize("isa", ISAS)
def test_bytes_of_a_long_decode_do_not_depend_on_the_threads(isa: str) -> None:
    """With several threads the context of one query is shared out in segments."""
    layer = Layer(isa=isa, heads=6, kv_heads=2, dtype="bf16")
    results = []
    for num_threads in (1, 2, 5):
        sequence = Sequence(layer, 1402, list(range(1, 89)), seed=4)
        machine = Machine(layer, num_threads=num_threads, num_blocks=90, max_tokens=1400)
        results.append(machine.run_all(sequence, [1400, 1, 1])[1400:])
    check_values(layer, results[0], sequence.expected(layer, 1402)[1400:])
    assert_same_bytes(results[1], results[0])
    assert_same_bytes(results[2], results[0])


# --- activations -----------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (3, 3, 16), (6, 2, 16)])
@pytest.mark.parametrize("keep_rows", [True, False])
def test_activations_hold_the_rows(
    isa: str, heads: int, kv_heads: int, head_dim: int, keep_rows: bool
) -> None:
    layer = Layer(isa=isa, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    forms = (native.ActForm.Q8, native.ActForm.BF16, native.ActForm.F32)
    sequence = Sequence(layer, 37, [1, 2, 3], seed=1)
    machine = Machine(layer, acts=forms, keep_rows=keep_rows)
    machine.run([(sequence, 37)])
    want = sequence.expected(layer, 37)
    q8, bf16, f32 = (act.dequantize(machine.step, native.RowSet.Tokens) for act in machine.acts)
    check_values(layer, f32, want)
    np.testing.assert_allclose(bf16, want, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(q8, want, rtol=0, atol=np.abs(want).max() / 250)
    if keep_rows:
        assert_same_bytes(f32, machine.out.numpy()[:37])


# --- refusals --------------------------------------------------------------------------------


def test_the_default_dtype_is_one_the_cache_takes() -> None:
    for isa in ISAS:
        device = native.make_device(isa)
        dtype = native.default_kv_dtype(device)
        cache = native.KVCache(device, 2, 3, 64, 10, dtype=dtype)
        assert cache.dtype == dtype
        assert cache.nbytes == 2 * 2 * 3 * 10 * 16 * 64 * (4 if dtype == "fp32" else 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 40}, "head_dim is 40, the kernels need a multiple of 16"),
        ({"block_size": 32}, "block_size is 32, the kernels need 16"),
        ({"dtype": "int8"}, "dtype is 'int8', must be bf16, fp16 or fp32"),
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
    ],
)
def test_a_cache_of_impossible_shape_is_refused(change: dict[str, Any], message: str) -> None:
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "num_blocks": 4, **change}
    with pytest.raises(ValueError, match=message):
        native.KVCache(native.make_device(), **shape)


def test_a_block_id_outside_the_cache_is_refused() -> None:
    layer = Layer()
    machine = Machine(layer, num_blocks=4)
    with pytest.raises(ValueError, match="block id 4 is outside the cache of 4 blocks"):
        machine.run([(Sequence(layer, 20, [1, 4], seed=1), 20)])
    fine = Sequence(layer, 20, [1, 3], seed=1)
    check_values(layer, machine.run([(fine, 20)])[0], fine.expected(layer, 20))


def test_wrong_widths_are_refused() -> None:
    layer = Layer()
    machine = Machine(layer)
    narrow = native.Rows(layer.width - 1, 8)
    with pytest.raises(ValueError, match="q_out is not num_heads"):
        native.add_rope_cache(
            machine.plan, machine.device, machine.cache, 0, machine.qkv, narrow,
            native.RopeTable(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)),
            num_heads=layer.heads, scale=1.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="q or rows is not"):
        native.add_attention(
            machine.plan, machine.device, machine.cache, 0, narrow,
            num_heads=layer.heads, num_threads=1, rows=machine.out,
        )  # fmt: skip
    with pytest.raises(ValueError, match="nothing to write to"):
        native.add_attention(
            machine.plan, machine.device, machine.cache, 0, machine.q,
            num_heads=layer.heads, num_threads=1,
        )  # fmt: skip
