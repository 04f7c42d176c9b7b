"""The oracle itself: against closed forms, other formulations and hand-worked numbers."""

from __future__ import annotations

import math

import msgspec.structs
import numpy as np
import pytest

from twostep.config.model import RopeConfig
from twostep.ops.formats import quantize
from twostep.ops.protocol import AttentionSpec, RawTensor
from twostep.ops.reference.activation import gated, gelu_tanh, silu
from twostep.ops.reference.attention import attend, gather_kv, paged_attention, write_kv
from twostep.ops.reference.backend import ReferenceBatch, ReferenceOps, ReferenceWeights
from twostep.ops.reference.linear import linear, quantize_rows_q8, softcap
from twostep.ops.reference.moe import route
from twostep.ops.reference.norm import rms_norm
from twostep.ops.reference.rope import apply_rope, attention_factor, inv_freq, rope_tables
from twostep.ops.reference.rounding import round_bf16, round_fp16, round_to


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- rounding --------------------------------------------------------------------------------


def test_bf16_rounds_to_nearest_even() -> None:
    step = 2.0**-7
    values = np.array(
        [1 + step / 2, 1 + 1.5 * step, 1 + 0.49 * step, 1 + 0.51 * step, -1 - step / 2]
    )
    expected = [1.0, 1 + 2 * step, 1.0, 1 + step, -1.0]
    np.testing.assert_array_equal(round_bf16(values), np.array(expected, np.float32))
    assert np.isnan(round_bf16(np.array([np.nan], np.float32)))
    assert round_bf16(np.array([np.inf], np.float32)) == np.inf
    assert round_bf16(np.array([3.4e38], np.float32)) == np.inf


def test_fp16_and_passing_through() -> None:
    assert round_fp16(np.array([2049.0]))[0] == 2048
    assert np.isinf(round_fp16(np.array([1e6])))[0]
    x = draw(7)
    np.testing.assert_array_equal(round_to(x, "fp32"), x)
    np.testing.assert_array_equal(round_to(x, "bf16"), round_bf16(x))
    np.testing.assert_array_equal(round_to(x, "fp16"), round_fp16(x))


# --- linear ----------------------------------------------------------------------------------


def test_quantize_rows_q8_by_hand() -> None:
    x = np.zeros((2, 64), np.float32)
    x[0, :4] = [127.0, 2.5, 3.5, -0.5]
    x[1, 40] = -0.5
    q, scale = quantize_rows_q8(x)
    assert scale.tolist() == [[1.0, 0.0], [0.0, np.float32(0.5) / np.float32(127)]]
    # Halves go to the even neighbour.
    assert q[0, :4].tolist() == [127, 2, 4, 0]
    assert q[1, 40] == -127
    assert np.count_nonzero(q) == 4
    assert q.dtype == np.int8


def test_linear_modes() -> None:
    x, w, bias = draw(5, 96), draw(7, 96, seed=1), draw(7, seed=2)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + bias
    np.testing.assert_allclose(linear(x, w, bias=bias), exact, rtol=1e-7)
    rounded = round_bf16(x).astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(linear(x, w, "bf16"), rounded, rtol=1e-6)
    q, scale = quantize_rows_q8(x)
    groups = q.reshape(5, 3, 32).astype(np.float64) * scale[..., None]
    np.testing.assert_allclose(
        linear(x, w, "q8"), groups.reshape(5, 96) @ w.T.astype(np.float64), rtol=1e-6
    )
    assert np.abs(linear(x, w, "q8") - exact + bias).max() > 1e-4


def test_linear_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias = draw(3, 32), draw(10, 32, seed=1), draw(10, seed=2)
    whole = linear(x, w, bias=bias)
    monkeypatch.setattr("twostep.ops.reference.linear._ROWS_AT_ONCE", 3)
    np.testing.assert_allclose(linear(x, w, bias=bias), whole, rtol=1e-6)


def test_softcap() -> None:
    x = np.array([-100.0, 0.0, 0.01, 100.0], np.float32)
    np.testing.assert_allclose(softcap(x, 5.0), [-5, 0, 0.01, 5], rtol=1e-5)
    np.testing.assert_array_equal(softcap(x, 0.0), x)


# --- norm, activations -----------------------------------------------------------------------


def test_rms_norm() -> None:
    x = np.array([[3.0, 4.0]], np.float32)
    weight = np.array([1.0, 2.0], np.float32)
    expected = [[3 / math.sqrt(12.5 + 0.5), 8 / math.sqrt(12.5 + 0.5)]]
    np.testing.assert_allclose(rms_norm(x, weight, 0.5), expected, rtol=1e-7)


def test_activations() -> None:
    assert silu(np.array([0.0, 1.0]))[1] == pytest.approx(1 / (1 + math.exp(-1)))
    assert silu(np.array([-1.0]))[0] == pytest.approx(-1 / (1 + math.e))
    assert silu(np.array([-1000.0, 1000.0])).tolist() == [0.0, 1000.0]
    # The tanh form lies within 1e-3 of x * Phi(x).
    for x in (-3.0, -0.5, 0.7, 2.0):
        phi = 0.5 * (1 + math.erf(x / math.sqrt(2)))
        assert gelu_tanh(np.array([x]))[0] == pytest.approx(x * phi, abs=1e-3)
        assert gelu_tanh(np.array([x]))[0] != x * phi
    up = np.array([3.0], np.float32)
    assert gated(np.array([2.0]), up, "silu")[0] == pytest.approx(6 / (1 + math.exp(-2)))
    assert gated(np.array([2.0]), up, "gelu_tanh")[0] == pytest.approx(2 * 0.9772 * 3, abs=1e-2)


# --- rope ------------------------------------------------------------------------------------

PLAIN = RopeConfig(theta=10000.0, rotary_dim=8)


def test_inv_freq() -> None:
    np.testing.assert_allclose(inv_freq(PLAIN), [1, 0.1, 0.01, 0.001])
    linear_scaled = msgspec.structs.replace(PLAIN, scaling="linear", factor=4.0)
    np.testing.assert_allclose(inv_freq(linear_scaled), np.array([1, 0.1, 0.01, 0.001]) / 4)
    divided = msgspec.structs.replace(PLAIN, freq_factors=(1.0, 2.0, 4.0, 8.0))
    np.testing.assert_allclose(inv_freq(divided), [1, 0.05, 0.0025, 0.000125])


def test_llama3_scaling_has_three_zones() -> None:
    """Waves of 6.28, 62.8, 628, 6283 tokens in a context of 628 * 2."""
    rope = msgspec.structs.replace(
        PLAIN, scaling="llama3", factor=8.0, original_max_position=1256, high_freq_factor=4.0
    )
    got = inv_freq(rope)
    np.testing.assert_allclose(got[:2], [1, 0.1])
    smooth = (1256 * 0.01 / (2 * math.pi) - 1) / 3
    assert got[2] == pytest.approx(0.01 * ((1 - smooth) / 8 + smooth))
    assert got[3] == pytest.approx(0.001 / 8)


def test_yarn_keeps_fast_and_slows_slow_pairs() -> None:
    rope = RopeConfig(
        theta=10000.0, rotary_dim=64, scaling="yarn", factor=4.0, original_max_position=2048
    )
    ratio = inv_freq(rope) / inv_freq(msgspec.structs.replace(rope, scaling="none"))
    assert ratio[0] == 1
    assert ratio[-1] == 0.25
    assert (np.diff(ratio) <= 0).all()
    # Pairs turning 32 times and once in 2048 tokens are numbers 8.1 and 20.1.
    assert ratio[8] == 1
    assert ratio[9] < 1
    assert ratio[20] > 0.25
    assert ratio[21] == 0.25
    assert attention_factor(rope) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(msgspec.structs.replace(rope, attention_factor=1.5)) == 1.5
    assert attention_factor(PLAIN) == 1


def test_rope_tables() -> None:
    rope = msgspec.structs.replace(PLAIN, scaling="yarn", factor=4.0, original_max_position=64)
    cos, sin = rope_tables(rope, 100)
    assert cos.shape == sin.shape == (100, 4)
    assert cos.dtype == sin.dtype == np.float32
    factor = 0.1 * math.log(4) + 1
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-6)
    assert cos[99, 0] == pytest.approx(math.cos(99) * factor, abs=1e-6)
    assert rope_tables(PLAIN, 3)[1][2, 1] == pytest.approx(math.sin(0.2), rel=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rope_turns_each_pair(interleaved: bool) -> None:
    """As a complex product, with dimensions beyond the rotary ones left alone."""
    x = draw(3, 2, 12)
    cos, sin = (table[[5, 0, 9]] for table in rope_tables(PLAIN, 10))
    got = apply_rope(x, cos, sin, interleaved=interleaved)
    first, second = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(4), slice(4, 8))
    turned = (x[..., first] + 1j * x[..., second]) * (cos + 1j * sin)[:, None, :]
    np.testing.assert_allclose(got[..., first], turned.real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[..., second], turned.imag, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(got[1], x[1])


# --- attention -------------------------------------------------------------------------------


def test_attend_by_hand() -> None:
    """Two equal keys share; a third, later one is not seen."""
    q = np.ones((1, 1, 2), np.float32)
    k = np.ones((3, 1, 2), np.float32)
    v = np.array([[[1.0, 0.0]], [[3.0, 4.0]], [[99.0, 99.0]]], np.float32)
    np.testing.assert_allclose(attend(q, k, v, np.array([1]), scale=1.0)[0, 0], [2, 2])
    windowed = attend(q, k, v, np.array([1]), scale=1.0, sliding_window=1)
    np.testing.assert_allclose(windowed[0, 0], [3, 4])


def test_attend_groups_scale_and_softcap() -> None:
    q, k, v = draw(1, 4, 8), draw(5, 2, 8, seed=1), draw(5, 2, 8, seed=2)
    got = attend(q, k, v, np.array([4]), scale=0.3, softcap=1.5)
    for head in range(4):
        scores = 1.5 * np.tanh(k[:, head // 2] @ q[0, head] * 0.3 / 1.5)
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(got[0, head], weights @ v[:, head // 2], rtol=1e-5)


def test_attend_with_large_scores_stays_finite() -> None:
    q = np.full((1, 1, 4), 1e4, np.float32)
    k = np.stack([q[0], -q[0]])
    v = draw(2, 1, 4)
    np.testing.assert_allclose(attend(q, k, v, np.array([1]), scale=1.0)[0], v[0], rtol=1e-6)


def test_paged_attention_equals_contiguous() -> None:
    q, k, v = draw(3, 2, 8), draw(11, 1, 8, seed=1), draw(11, 1, 8, seed=2)
    k_cache = np.full((6, 4, 1, 8), np.nan, np.float32)
    v_cache = k_cache.copy()
    table, positions = np.array([4, 1, 5]), np.arange(8, 11)
    write_kv(k_cache, k, table, np.arange(11))
    write_kv(v_cache, v, table, np.arange(11))
    np.testing.assert_array_equal(gather_kv(k_cache, table, 11), k)
    np.testing.assert_array_equal(k_cache[1, 2], k[6])
    for window in (None, 1, 4, 100):
        got = paged_attention(
            q, k_cache, v_cache, table, positions, scale=0.2, sliding_window=window
        )
        want = attend(q, k, v, positions, scale=0.2, sliding_window=window)
        np.testing.assert_array_equal(got, want)


def test_kv_is_rounded_when_stored() -> None:
    cache = np.zeros((1, 4, 1, 8), np.float32)
    rows = draw(4, 1, 8)
    write_kv(cache, rows, np.array([0]), np.arange(4), "bf16")
    np.testing.assert_array_equal(cache[0], round_bf16(rows))


# --- mixture of experts ----------------------------------------------------------------------


def test_route() -> None:
    logits = np.array([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    experts, weights = route(logits, 2, norm_topk_prob=True)
    assert experts.tolist() == [[1, 3], [0, 1]]
    np.testing.assert_allclose(weights, 0.5)
    experts, weights = route(logits, 3, norm_topk_prob=False)
    assert experts.tolist() == [[1, 2, 3], [0, 1, 2]]
    total = np.exp([1.0, 3.0, 2.0, 3.0]).sum()
    np.testing.assert_allclose(weights[0], np.exp([3.0, 2.0, 3.0]) / total, rtol=1e-6)
    np.testing.assert_allclose(weights[1], 0.25)


# --- the backend -----------------------------------------------------------------------------


def raw(name: str, values: np.ndarray, fmt: str = "F32") -> RawTensor:
    data = quantize(values, fmt) if fmt != "F32" else values.view(np.uint8).reshape(-1)
    return RawTensor(name=name, format=fmt, shape=values.shape, data=data)


def make_ops(**options: int) -> ReferenceOps:
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "num_blocks": 6, "block_size": 4}
    return ReferenceOps(**(sizes | options))  # type: ignore[arg-type]


def test_weights_mimic_the_kernels_if_told() -> None:
    a, b = draw(4, 64), draw(2, 64, seed=1)
    exact, native = ReferenceWeights(), ReferenceWeights(exact=False)
    parts = [raw("a", a, "Q8_0"), raw("b", b, "Q4_0")]
    assert exact.linear(parts, precision="int8").act == "f32"
    stacked = native.linear(parts, precision="int8")
    assert (stacked.act, stacked.values.shape) == ("q8", (6, 64))
    assert native.linear(parts, precision="bf16").act == "bf16"
    floats = native.linear([raw("a", a)], precision="bf16")
    np.testing.assert_array_equal(floats.values, round_bf16(a))


def test_batch_layout() -> None:
    batch = ReferenceBatch.of([([5, 6, 7], 0, [3]), ([8], 9, [1, 2, 4])])
    assert batch.token_ids.tolist() == [5, 6, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2, 9]
    assert batch.query_start_loc.tolist() == [0, 3, 4]
    assert batch.logits_indices.tolist() == [2, 3]
    every = ReferenceBatch.of([([5, 6, 7], 0, [3]), ([8], 9, [1, 2, 4])], logits="all")
    assert every.logits_indices.tolist() == [0, 1, 2, 3]


def test_embed_logits_and_rows() -> None:
    ops, table = make_ops(), ReferenceWeights().linear([raw("t", draw(10, 8))], precision="bf16")
    batch = ReferenceBatch.of([([3, 9], 0, [1])])
    np.testing.assert_array_equal(ops.embed(table, batch, scale=2.0), table.values[[3, 9]] * 2)
    x = draw(2, 8, seed=4)
    np.testing.assert_array_equal(ops.gather_rows(x, batch), x[1:])
    capped = ops.logits(x, table, softcap=0.5)
    np.testing.assert_allclose(capped, 0.5 * np.tanh((x @ table.values.T) / 0.5), rtol=1e-4)
    np.testing.assert_array_equal(ops.add(x, x), 2 * x)


def test_attention_norms_then_rotates_then_stores() -> None:
    ops = make_ops()
    spec = AttentionSpec(
        layer=0,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        scale=0.5,
        rope=PLAIN,
        qk_norm_eps=1e-6,
    )
    weights = ReferenceWeights()
    q_norm, k_norm = weights.vector(raw("q", draw(8))), weights.vector(raw("k", draw(8, seed=1)))
    qkv = draw(3, 32, seed=2)
    batch = ReferenceBatch.of([([0, 0, 0], 0, [2])])
    queries = ops.rope_cache(qkv, batch, spec, q_norm=q_norm, k_norm=k_norm)
    got = ops.attention(queries, batch, spec)
    rows = qkv.reshape(3, 4, 8)
    cos, sin = rope_tables(PLAIN, 3)
    q = apply_rope(rms_norm(rows[:, :2], q_norm.values, 1e-6), cos, sin)
    k = apply_rope(rms_norm(rows[:, 2:3], k_norm.values, 1e-6), cos, sin)
    want = attend(q, k, rows[:, 3:], np.arange(3), scale=0.5)
    np.testing.assert_array_equal(got, want.reshape(3, 16))
    np.testing.assert_array_equal(ops.attention(queries, batch, spec, sampled=True), got[2:])
    np.testing.assert_array_equal(ops.k_cache[0, 2, :3], k)
    assert np.isnan(ops.v_cache[0, 2, 3]).all()


def test_moe_sums_its_experts() -> None:
    ops, weights = make_ops(), ReferenceWeights()

    def matrix(rows: int, seed: int) -> np.ndarray:
        return draw(rows, 8, seed=seed)

    router = weights.linear([raw("r", matrix(3, 9))], precision="bf16")
    gate, up, down = (
        [weights.linear([raw("w", matrix(8, 3 * e + i))], precision="bf16") for e in range(3)]
        for i in range(3)
    )
    x = draw(5, 8, seed=20)
    got = ops.moe(x, router, gate, up, down, top_k=2, norm_topk_prob=True, activation="silu")
    experts, shares = route(x @ router.values.T, 2, norm_topk_prob=True)
    for row in range(5):
        want = np.zeros(8)
        for expert, share in zip(experts[row], shares[row], strict=True):
            hidden = gated(x[row] @ gate[expert].values.T, x[row] @ up[expert].values.T, "silu")
            want += share * (hidden @ down[expert].values.T)
        np.testing.assert_allclose(got[row], want, rtol=1e-4, atol=1e-5)
