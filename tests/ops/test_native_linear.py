"""The native linear family: every format, instruction set and shape against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from twostep.ops import formats
from twostep.ops.protocol import RawTensor

native = pytest.importorskip("twostep._native")
if not hasattr(native, "Weight"):
    pytest.skip("the native module was built without linear", allow_module_level=True)

pytestmark = pytest.mark.native

ISAS = native.cpu_info()["isas"]
QUANTIZED = [name for name, entry in formats.FORMATS.items() if entry.is_quantized]
FLOATS = ["F32", "F16", "BF16"]
ROWS = [1, 2, 3, 5, 17, 64]
TOKENS, LOGITS = native.RowSet.Tokens, native.RowSet.Logits
Q8, BF16, F32 = native.ActForm.Q8, native.ActForm.BF16, native.ActForm.F32


def random_raw(rng: np.random.Generator, name: str, n: int, k: int) -> RawTensor:
    """Random blocks with sane scales: every bit pattern of the integers occurs."""
    entry = formats.FORMATS[name]
    if not entry.is_quantized:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if name == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            data = values.astype(entry.layout["v"])
        return RawTensor(name="w", format=name, shape=(n, k), data=data.view(np.uint8).reshape(-1))
    blocks = np.zeros(n * k // entry.block_length, dtype=entry.layout)
    random = rng.integers(0, 256, blocks.nbytes, dtype=np.uint8)
    blocks = random.view(entry.layout)
    size = 1e-4 if name.endswith("_K") else 1e-2
    for field in ("d", "m"):
        if field in entry.layout.names:
            signs = rng.choice([-1.0, 1.0], len(blocks)) if field == "m" else 1.0
            blocks[field] = (rng.uniform(0.1, 1.0, len(blocks)) * size * signs).astype(np.float16)
    return RawTensor(name="w", format=name, shape=(n, k), data=blocks.view(np.uint8).reshape(-1))


def part(raw: RawTensor) -> tuple[str, int, int, np.ndarray]:
    return raw.format, raw.shape[0], raw.shape[1], raw.data


def make_step(device: Any, rows: int, logits: np.ndarray | None = None) -> Any:
    """One request with ``rows`` tokens, all of them (or ``logits``) sampled."""
    ints = lambda *v: np.array(v, dtype=np.int32)  # noqa: E731
    sampled = np.arange(rows, dtype=np.int32) if logits is None else logits.astype(np.int32)
    return native.make_step(
        device,
        rows,
        ints(0, rows),
        ints(rows),
        ints(0),
        sampled,
        np.zeros_like(sampled),
        np.zeros((1, rows), dtype=np.int32),
        1,
    )


class Bench:
    """A device, a stream, and the buffers of one test."""

    def __init__(self, isa: str, threads: int = 1) -> None:
        self.device = native.make_device(isa)
        self.stream = native.Stream(threads)

    def rows(self, values: np.ndarray) -> Any:
        rows = native.Rows(values.shape[1], values.shape[0])
        rows.numpy()[:] = values
        return rows

    def run(self, plan: Any, step: Any) -> None:
        self.stream.wait(self.stream.launch(plan, step))

    def weight(self, raws: list[RawTensor], precision: str) -> Any:
        return native.Weight(self.device, [part(r) for r in raws], precision, 2)

    def linear(
        self,
        x: np.ndarray,
        weight: Any,
        bias: np.ndarray | None = None,
        add_to: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The product, and the activations that it read."""
        plan = native.Plan()
        act = native.ActBuffer(weight.act_form, x.shape[1], len(x))
        out = native.Rows(weight.shape[0], len(x))
        if add_to is not None:
            out.numpy()[:] = add_to
        native.add_put_rows(plan, self.device, self.rows(x), TOKENS, [act])
        vector = None if bias is None else native.Vector(bias)
        native.add_linear(plan, self.device, act, weight, vector, out, add_to is not None, TOKENS)
        step = make_step(self.device, len(x))
        self.run(plan, step)
        return out.numpy().copy(), act.dequantize(step, TOKENS)


def unpacked(weight: Any) -> np.ndarray:
    return weight.unpack_rows(np.arange(weight.shape[0], dtype=np.int32))


def check(got: np.ndarray, x: np.ndarray, w: np.ndarray, slack: float = 1e-6) -> None:
    wide_x, wide_w = x.astype(np.float64), w.astype(np.float64)
    want = wide_x @ wide_w.T
    terms = np.abs(wide_x) @ np.abs(wide_w).T
    worst = np.max(np.abs(got - want) / np.maximum(terms, 1e-30))
    assert worst <= slack, f"worst |err| / sum|terms| is {worst:.2e}"


def inputs(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    x = rng.standard_normal((rows, k)).astype(np.float32)
    x[:, rng.integers(0, k, max(1, k // 64))] *= 20  # outliers, as real activations have
    return x


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [*QUANTIZED, *FLOATS])
def test_unpack_gives_the_files_weights(isa: str, name: str) -> None:
    raw = random_raw(np.random.default_rng(1), name, 37, 512)
    got = unpacked(Bench(isa).weight([raw], "int8"))
    np.testing.assert_array_equal(got, formats.dequantize(raw))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("size", [6e-8, 3e-7, 30000.0])
def test_no_k_quant_scale_is_rounded(isa: str, name: str, size: float) -> None:
    """d * scale far below and far beyond fp16's range."""
    raw = random_raw(np.random.default_rng(2), name, 19, 512)
    blocks = raw.data.view(formats.FORMATS[name].layout)
    for field in ("d", "m"):
        if field in blocks.dtype.names:
            blocks[field] = size
    bench = Bench(isa)
    want = formats.dequantize(raw)
    assert np.abs(want).max() > 0
    x = inputs(np.random.default_rng(3), 2, 512)
    for precision in ("int8", "bf16"):
        weight = bench.weight([raw], precision)
        np.testing.assert_array_equal(unpacked(weight), want)
        got, seen = bench.linear(x, weight)
        check(got, seen, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("rows", ROWS)
def test_quantized_linear(isa: str, precision: str, name: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    bench = Bench(isa, threads=2)
    k = 512 if name.endswith("_K") else 576
    weight = bench.weight([random_raw(rng, name, 45, k)], precision)
    got, seen = bench.linear(inputs(rng, rows, k), weight)
    assert weight.act_form == (Q8 if precision == "int8" else F32)
    check(got, seen, unpacked(weight))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(45, 576), (7, 45), (96, 1)])
def test_float_linear(isa: str, name: str, rows: int, n: int, k: int) -> None:
    rng = np.random.default_rng(rows)
    bench = Bench(isa, threads=2)
    weight = bench.weight([random_raw(rng, name, n, k)], "int8")
    got, seen = bench.linear(inputs(rng, rows, k), weight)
    check(got, seen, unpacked(weight))
    multiplies_bf16 = name == "BF16" and isa in ("avx512", "amx")
    assert weight.act_form == (BF16 if multiplies_bf16 else F32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "BF16"])
@pytest.mark.parametrize(("n", "k"), [(33, 2048), (17, 8192), (200, 1536)])
def test_real_widths(isa: str, name: str, n: int, k: int) -> None:
    rng = np.random.default_rng(k)
    bench = Bench(isa)
    weight = bench.weight([random_raw(rng, name, n, k)], "int8")
    got, seen = bench.linear(inputs(rng, 3, k), weight)
    check(got, seen, unpacked(weight), 2e-6 if k == 8192 else 1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("names", "precision"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), "int8"),
        (("Q8_0", "BF16"), "int8"),
        (("BF16", "F16", "Q5_K"), "bf16"),
    ],
)
def test_parts_of_different_formats(isa: str, names: tuple[str, ...], precision: str) -> None:
    rng = np.random.default_rng(3)
    bench = Bench(isa, threads=2)
    raws = [random_raw(rng, name, n, 512) for name, n in zip(names, (72, 40, 21), strict=False)]
    weight = bench.weight(raws, precision)
    x = inputs(rng, 5, 512)
    bias = rng.standard_normal(weight.shape[0]).astype(np.float32)
    before = rng.standard_normal((5, weight.shape[0])).astype(np.float32)
    plain, seen = bench.linear(x, weight)
    check(plain, seen, unpacked(weight))
    full, _ = bench.linear(x, weight, bias, before)
    np.testing.assert_array_equal(full, before + (plain + bias))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "int8") for name in (*QUANTIZED, *FLOATS)),
        *((name, "bf16") for name in QUANTIZED),
    ],
)
def test_a_row_is_the_same_in_every_batch(isa: str, name: str, precision: str) -> None:
    rng = np.random.default_rng(4)
    alone, batched = Bench(isa, threads=1), Bench(isa, threads=2)
    weight = alone.weight([random_raw(rng, name, 72, 256)], precision)
    x = inputs(rng, 40, 256)
    want = np.concatenate([alone.linear(x[m : m + 1], weight)[0] for m in range(40)])
    for rows in range(1, 41):
        got, _ = batched.linear(x[:rows], weight)
        np.testing.assert_array_equal(got, want[:rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [97, 130, 900])
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "BF16"])
def test_a_row_is_the_same_among_many_rows(isa: str, rows: int, name: str) -> None:
    """From eight tiles on products are cut by rows, too: into two parts, into more for 900 rows."""
    rng = np.random.default_rng(6)
    alone, batched = Bench(isa, threads=1), Bench(isa, threads=2)
    weight = alone.weight([random_raw(rng, name, 136, 1024)], "int8")
    x = inputs(rng, rows, 1024)
    before = rng.standard_normal((rows, 136)).astype(np.float32)
    got, _ = batched.linear(x, weight, add_to=before)
    for first in range(0, rows, 40):
        part = slice(first, first + 40)
        want, _ = alone.linear(x[part], weight, add_to=before[part])
        np.testing.assert_array_equal(got[part], want)


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_bytes_do_not_saturate(isa: str) -> None:
    """-128 times 127 in every position, both signs, and the largest of each narrow format."""
    bench = Bench(isa)
    x = np.full((2, 64), 1.0, dtype=np.float32)
    x[1] = -1.0
    for name, byte in (("Q8_0", 0x80), ("Q8_0", 0x7F), ("Q4_0", 0xFF), ("Q4_0", 0x00),
                       ("Q4_1", 0xFF), ("Q5_0", 0xFF), ("Q5_1", 0xFF)):  # fmt: skip
        raw = random_raw(np.random.default_rng(5), name, 24, 64)
        blocks = raw.data.view(formats.FORMATS[name].layout)
        blocks["qs"] = np.array(byte, dtype=np.uint8).view(blocks["qs"].dtype)
        if "qh" in blocks.dtype.names:
            blocks["qh"] = 0xFF
        weight = bench.weight([raw], "int8")
        got, seen = bench.linear(x, weight)
        check(got, seen, unpacked(weight), 1e-6)
    raw = random_raw(np.random.default_rng(5), "Q6_K", 24, 256)
    blocks = raw.data.view(formats.FORMATS["Q6_K"].layout)
    blocks["ql"], blocks["qh"], blocks["scales"] = 0xFF, 0xFF, -128
    weight = bench.weight([raw], "int8")
    got, seen = bench.linear(np.tile(x, 4), weight)
    check(got, seen, unpacked(weight))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "precision"), [("Q4_0", "int8"), ("Q8_0", "bf16"), ("F32", "bf16")]
)
def test_bad_inputs_show_and_stay_in_their_row(
    isa: str, bad: float, name: str, precision: str
) -> None:
    rng = np.random.default_rng(6)
    bench = Bench(isa)
    weight = bench.weight([random_raw(rng, name, 40, 96)], precision)
    x = inputs(rng, 5, 96)
    want, _ = bench.linear(x, weight)
    for at in (0, 37, 95):
        broken = x.copy()
        broken[2, at] = bad
        got, _ = bench.linear(broken, weight)
        assert not np.isfinite(got[2]).any()
        np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))


@pytest.mark.parametrize("isa", ISAS)
def test_zero_rows_and_groups_give_zeros(isa: str) -> None:
    rng = np.random.default_rng(7)
    bench = Bench(isa)
    weight = bench.weight([random_raw(rng, "Q4_1", 40, 96)], "int8")
    x = inputs(rng, 3, 96)
    x[1] = 0
    x[2, 32:64] = 0
    got, seen = bench.linear(x, weight)
    np.testing.assert_array_equal(got[1], 0)
    check(got, seen, unpacked(weight))


def test_a_step_without_rows_is_fine() -> None:
    bench = Bench("")
    weight = bench.weight([random_raw(np.random.default_rng(0), "Q8_0", 40, 96)], "int8")
    plan = native.Plan()
    act, out = native.ActBuffer(Q8, 96, 4), native.Rows(40, 4)
    native.add_logits(plan, bench.device, act, weight, 0.0, out)
    bench.run(plan, make_step(bench.device, 4, np.array([], dtype=np.int32)))
    np.testing.assert_array_equal(out.numpy(), 0)


@pytest.mark.parametrize("isa", ISAS)
def test_logits_of_sampled_rows_with_softcap(isa: str) -> None:
    rng = np.random.default_rng(8)
    bench = Bench(isa, threads=2)
    weight = bench.weight([random_raw(rng, "Q8_0", 500, 64)], "int8")
    x = inputs(rng, 3, 64)
    act, out = native.ActBuffer(Q8, 64, 8), native.Rows(500, 8)
    plan = native.Plan()
    native.add_put_rows(plan, bench.device, bench.rows(x), LOGITS, [act])
    native.add_logits(plan, bench.device, act, weight, 30.0, out)
    bench.run(plan, make_step(bench.device, 8, np.array([1, 4, 7])))
    plain, _ = bench.linear(x, weight)
    want = 30 * np.tanh(plain.astype(np.float64) / 30)
    np.testing.assert_allclose(out.numpy()[:3], want, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("formats_", "n"), [(("Q4_0", "Q4_0"), 96), (("Q4_K", "Q6_K"), 90),
                                             (("BF16", "BF16"), 64)])  # fmt: skip
def test_gated_linear(isa: str, activation: str, formats_: tuple[str, str], n: int) -> None:
    rng = np.random.default_rng(9)
    bench = Bench(isa, threads=2)
    raws = [random_raw(rng, name, n, 256) for name in formats_]
    weight = native.gated_weight(bench.device, part(raws[0]), part(raws[1]), "int8", 2)
    rows = 17
    x = inputs(rng, rows, 256)
    gate, _ = bench.linear(x, bench.weight([raws[0]], "int8"))
    up, _ = bench.linear(x, bench.weight([raws[1]], "int8"))
    plan = native.Plan()
    act = native.ActBuffer(weight.act_form, 256, rows)
    acts = [native.ActBuffer(form, n, rows) for form in (Q8, F32)]
    out = native.Rows(n, rows)
    native.add_put_rows(plan, bench.device, bench.rows(x), TOKENS, [act])
    native.add_gated_linear(plan, bench.device, act, weight, activation, acts, out, TOKENS)
    step = make_step(bench.device, rows)
    bench.run(plan, step)
    wide = gate.astype(np.float64)
    if activation == "silu":
        want = wide / (1 + np.exp(-wide))
    else:
        want = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(out.numpy(), want * up, rtol=2e-6, atol=1e-6 * np.abs(up).max())
    np.testing.assert_array_equal(acts[1].dequantize(step, TOKENS), out.numpy())
    again = native.ActBuffer(Q8, n, rows)
    plan = native.Plan()
    native.add_put_rows(plan, bench.device, out, TOKENS, [again])
    bench.run(plan, step)
    np.testing.assert_array_equal(acts[0].dequantize(step, TOKENS), again.dequantize(step, TOKENS))


@pytest.mark.parametrize("isa", ISAS)
def test_gated_rows_do_not_depend_on_the_batch(isa: str) -> None:
    rng = np.random.default_rng(10)
    raws = [random_raw(rng, "Q4_0", 96, 64) for _ in range(2)]
    x = inputs(rng, 21, 64)

    def run(threads: int, rows: np.ndarray) -> np.ndarray:
        bench = Bench(isa, threads)
        weight = native.gated_weight(bench.device, part(raws[0]), part(raws[1]), "int8", 1)
        act, out = native.ActBuffer(Q8, 64, len(rows)), native.Rows(96, len(rows))
        plan = native.Plan()
        native.add_put_rows(plan, bench.device, bench.rows(rows), TOKENS, [act])
        native.add_gated_linear(plan, bench.device, act, weight, "silu", [], out, TOKENS)
        bench.run(plan, make_step(bench.device, len(rows)))
        return out.numpy().copy()

    alone = np.concatenate([run(1, x[m : m + 1]) for m in range(21)])
    np.testing.assert_array_equal(run(2, x), alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "BF16", "F32"])
def test_embed_reads_the_packed_weight(isa: str, name: str) -> None:
    rng = np.random.default_rng(11)
    bench = Bench(isa, threads=2)
    weight = bench.weight([random_raw(rng, name, 50, 256)], "int8")
    table = native.TokenTable(1, 16)
    ids = np.array([0, 49, 7, 7, 31, 12], dtype=np.int32)
    plan = native.Plan()
    out = native.Rows(256, 16)
    native.add_apply_staged(plan)
    native.add_embed(plan, bench.device, table, weight, 3.0, out)
    step = make_step(bench.device, len(ids))
    step.stage_tokens(table, 0, 0, ids)
    bench.run(plan, step)
    np.testing.assert_array_equal(out.numpy()[:6], weight.unpack_rows(ids) * np.float32(3.0))


@pytest.mark.parametrize("bad", [-1, 50, 2**30])
def test_embed_refuses_ids_outside_the_vocabulary(bad: int) -> None:
    bench = Bench("")
    weight = bench.weight([random_raw(np.random.default_rng(0), "F32", 50, 32)], "int8")
    table, out, plan = native.TokenTable(1, 16), native.Rows(32, 16), native.Plan()
    native.add_apply_staged(plan)
    native.add_embed(plan, bench.device, table, weight, 1.0, out)
    step = make_step(bench.device, 2)
    step.stage_tokens(table, 0, 0, np.array([1, bad], dtype=np.int32))
    with pytest.raises(RuntimeError, match=f"token id {bad} is outside the vocabulary of 50"):
        bench.run(plan, step)


@dataclasses.dataclass
class MoeCase:
    gate: list[RawTensor]
    up: list[RawTensor]
    down: list[RawTensor]

    @classmethod
    def random(cls, rng: np.random.Generator, experts: int, h: int, i: int) -> MoeCase:
        make = lambda n, k: [random_raw(rng, "Q8_0", n, k) for _ in range(experts)]  # noqa: E731
        return cls(make(i, h), make(i, h), make(h, i))

    def run(
        self, bench: Bench, x: np.ndarray, logits: np.ndarray, top_k: int, norm: bool,
        precision: str = "bf16",
    ) -> np.ndarray:  # fmt: skip
        gated = [
            native.gated_weight(bench.device, part(g), part(u), precision, 1)
            for g, u in zip(self.gate, self.up, strict=True)
        ]
        down = [bench.weight([d], precision) for d in self.down]
        plan = native.Plan()
        act = native.ActBuffer(gated[0].act_form, x.shape[1], len(x))
        out = native.Rows(x.shape[1], len(x))
        out.numpy()[:] = 7  # is overwritten
        native.add_put_rows(plan, bench.device, bench.rows(x), TOKENS, [act])
        native.add_moe(
            plan, bench.device, bench.rows(logits), act, gated, down, top_k, norm, "silu", out
        )
        bench.run(plan, make_step(bench.device, len(x)))
        return out.numpy().copy()

    def expected(self, x: np.ndarray, logits: np.ndarray, top_k: int, norm: bool) -> np.ndarray:
        wide = logits.astype(np.float64)
        probs = np.exp(wide - wide.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        out = np.zeros(x.shape)
        for m, row in enumerate(x.astype(np.float64)):
            chosen = np.argsort(-wide[m], kind="stable")[:top_k]
            total = probs[m, chosen].sum() if norm else 1.0
            for e in chosen:
                gate = formats.dequantize(self.gate[e]).astype(np.float64) @ row
                up = formats.dequantize(self.up[e]).astype(np.float64) @ row
                h = gate / (1 + np.exp(-gate)) * up
                out[m] += probs[m, e] / total * (formats.dequantize(self.down[e]) @ h)
        return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("top_k", "norm"), [(2, True), (3, False), (5, True)])
def test_moe(isa: str, top_k: int, norm: bool) -> None:
    rng = np.random.default_rng(12)
    case = MoeCase.random(rng, 5, 64, 96)
    x = rng.standard_normal((19, 64)).astype(np.float32)
    logits = rng.standard_normal((19, 5)).astype(np.float32)
    logits[3] = 0.25  # ties go to the lower id
    bench = Bench(isa, threads=2)
    got = case.run(bench, x, logits, top_k, norm)
    want = case.expected(x, logits, top_k, norm)
    np.testing.assert_allclose(got, want, rtol=0, atol=np.abs(want).max() * 2e-6)
    rough = case.run(bench, x, logits, top_k, norm, "int8")
    np.testing.assert_allclose(rough, want, rtol=0, atol=np.abs(want).max() * 0.03)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_moe_rows_do_not_depend_on_the_batch(isa: str, precision: str) -> None:
    rng = np.random.default_rng(13)
    case = MoeCase.random(rng, 4, 64, 64)
    x = rng.standard_normal((40, 64)).astype(np.float32)
    logits = rng.standard_normal((40, 4)).astype(np.float32)
    one, two = Bench(isa, 1), Bench(isa, 2)
    together = case.run(two, x, logits, 2, True, precision)
    alone = [case.run(one, x[m : m + 1], logits[m : m + 1], 2, True, precision) for m in range(40)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_moe_shows_bad_router_logits() -> None:
    rng = np.random.default_rng(14)
    case = MoeCase.random(rng, 4, 64, 64)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    logits = rng.standard_normal((3, 4)).astype(np.float32)
    logits[1, 2] = np.nan
    got = case.run(Bench(""), x, logits, 2, True)
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()


def test_errors_name_the_cause() -> None:
    bench = Bench("")
    raw = random_raw(np.random.default_rng(0), "Q8_0", 8, 64)
    with pytest.raises(ValueError, match="bytes are not a Q8_0 matrix of 9 x 64"):
        native.Weight(bench.device, [("Q8_0", 9, 64, raw.data)], "int8", 1)
    with pytest.raises(ValueError, match="not a multiple of Q8_0's block of 32"):
        native.Weight(bench.device, [("Q8_0", 8, 60, raw.data)], "int8", 1)
    with pytest.raises(ValueError, match="'Q3_K' is not one this engine reads"):
        native.Weight(bench.device, [("Q3_K", 8, 64, raw.data)], "int8", 1)
    weight = bench.weight([raw], "int8")
    plan = native.Plan()
    with pytest.raises(ValueError, match="another activation form"):
        native.add_linear(plan, bench.device, native.ActBuffer(F32, 64, 1), weight, None,
                          native.Rows(8, 1))  # fmt: skip
    with pytest.raises(ValueError, match="N = 8"):
        native.add_linear(plan, bench.device, native.ActBuffer(Q8, 64, 1), weight, None,
                          native.Rows(9, 1))  # fmt: skip
