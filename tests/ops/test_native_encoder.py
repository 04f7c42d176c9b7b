"""The native ops of encoders and of pooling against the NumPy reference, on every kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from twostep.ops.reference.activation import gelu
from twostep.ops.reference.norm import layer_norm

native = pytest.importorskip("twostep._native")
pytestmark = pytest.mark.native

ISAS = native.cpu_info()["isas"]
WIDTHS = [1, 7, 32, 45, 384, 1000]
ROWS = 19
FORMS = [native.ActForm.F32, native.ActForm.BF16, native.ActForm.Q8]


def make_step(
    device: Any,
    lengths: list[int],
    *,
    computed: list[int] | None = None,
    rows: list[int] | None = None,
    logits: list[tuple[int, int]] | None = None,
) -> Any:
    """A step of so many tokens of each request; ``logits``: (flat row, request) of each."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    lens = [a + b for a, b in zip(lengths, computed or [0] * len(lengths), strict=True)]
    return native.make_step(
        device,
        starts[-1],
        starts,
        lens,
        rows or list(range(len(lengths))),
        [row for row, _ in logits or []],
        [request for _, request in logits or []],
        np.zeros((64, 64), np.int32),
        16,
    )


def run(plan: Any, step: Any, num_threads: int = 2) -> None:
    stream = native.Stream(num_threads)
    stream.wait(stream.launch(plan, step))


def fill(rows: Any, values: np.ndarray) -> None:
    rows.numpy()[: len(values)] = values


def vector(values: np.ndarray) -> Any:
    return native.Vector(np.ascontiguousarray(values.reshape(-1), np.float32))


def both_outputs(isa: str, x: np.ndarray, add: Any) -> tuple[np.ndarray, dict[Any, np.ndarray]]:
    """What ``add(plan, device, x, rows, acts)`` writes as rows and as activations."""
    device, plan = native.make_device(isa), native.Plan()
    width = x.shape[1]
    source, out = native.Rows(width, len(x)), native.Rows(width, len(x))
    acts = [native.ActBuffer(form, width, len(x)) for form in FORMS]
    fill(source, x)
    add(plan, device, source, out, acts)
    step = make_step(device, [len(x)])
    run(plan, step)
    tokens = native.RowSet.Tokens
    values = [act.dequantize(step, tokens) for act in acts]
    return out.numpy().copy(), dict(zip(FORMS, values, strict=True))


def check_forms(want: np.ndarray, acts: dict[Any, np.ndarray]) -> None:
    """Each form holds the rows themselves, as precisely as it can."""
    np.testing.assert_array_equal(acts[native.ActForm.F32], want)
    np.testing.assert_allclose(acts[native.ActForm.BF16], want, rtol=2**-8, atol=0)
    step = np.abs(want).max() / 127
    np.testing.assert_allclose(acts[native.ActForm.Q8], want, rtol=0, atol=step)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(isa: str, width: int) -> None:
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((ROWS, width)) * 3 + 40).astype(np.float32)  # far from zero
    weight, bias = rng.standard_normal((2, width), np.float32)

    def add(plan: Any, device: Any, source: Any, out: Any, acts: list[Any]) -> None:
        native.add_layer_norm(plan, device, source, vector(weight), vector(bias), 1e-5, out, acts)

    rows, acts = both_outputs(isa, x, add)
    np.testing.assert_allclose(rows, layer_norm(x, weight, bias, 1e-5), rtol=0, atol=2e-4)
    check_forms(rows, acts)


def test_layer_norm_of_equal_numbers_is_its_bias() -> None:
    x = np.full((1, 48), 7.25, np.float32)
    weight, bias = np.ones(48, np.float32), np.arange(48, dtype=np.float32)

    def add(plan: Any, device: Any, source: Any, out: Any, acts: list[Any]) -> None:
        native.add_layer_norm(plan, device, source, vector(weight), vector(bias), 1e-12, out, acts)

    for isa in ISAS:
        np.testing.assert_array_equal(both_outputs(isa, x, add)[0][0], bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gelu(isa: str, width: int) -> None:
    x = np.linspace(-30, 30, ROWS * width, dtype=np.float32).reshape(ROWS, width)
    x.reshape(-1)[:3] = [0.0, -0.0, 1e-20][: x.size]

    def add(plan: Any, device: Any, source: Any, out: Any, acts: list[Any]) -> None:
        native.add_gelu(plan, device, source, out, acts)

    rows, acts = both_outputs(isa, x, add)
    np.testing.assert_allclose(rows, gelu(x), rtol=3e-7, atol=2e-6)
    check_forms(rows, acts)


@pytest.mark.parametrize("isa", ISAS)
def test_a_broken_number_stays_one(isa: str) -> None:
    x = np.full((1, 40), 1.5, np.float32)
    x[0, 11] = np.nan

    def add(plan: Any, device: Any, source: Any, out: Any, acts: list[Any]) -> None:
        native.add_gelu(plan, device, source, out, acts)

    rows = both_outputs(isa, x, add)[0]
    assert np.isnan(rows[0]).nonzero()[0].tolist() == [11]


@pytest.mark.parametrize("isa", ISAS)
def test_positions_are_those_of_each_request(isa: str) -> None:
    rng = np.random.default_rng(3)
    table = rng.standard_normal((30, 45), np.float32)
    x = rng.standard_normal((12, 45), np.float32)
    device, plan, rows = native.make_device(isa), native.Plan(), native.Rows(45, 12)
    native.add_positions(plan, device, rows, vector(table))
    fill(rows, x)
    run(plan, make_step(device, [5, 7], computed=[0, 20]))
    positions = [*range(5), *range(20, 27)]
    np.testing.assert_array_equal(rows.numpy(), x + table[positions])
    with pytest.raises(ValueError, match="position 30 is beyond the table of 30"):
        run(plan, make_step(device, [1], computed=[30]))


def test_pooled_rows() -> None:
    x = np.arange(60, dtype=np.float32).reshape(12, 5)
    device, plan, rows, sampled = (
        native.make_device(), native.Plan(), native.Rows(5, 12), native.Rows(5, 2)
    )  # fmt: skip
    native.add_gather(plan, rows, sampled)
    native.add_pool_rows(plan, sampled)
    fill(rows, x)
    step = make_step(device, [5, 7], logits=[(4, 0), (11, 1)])
    pooled = native.PooledStep(step, 5)
    run(plan, step)
    np.testing.assert_array_equal(pooled.numpy(), x[[4, 11]])


def test_a_step_without_a_place_for_vectors_is_refused() -> None:
    device, plan, rows = native.make_device(), native.Plan(), native.Rows(5, 12)
    native.add_pool_rows(plan, rows)
    with pytest.raises(ValueError, match="no place for vectors"):
        run(plan, make_step(device, [5], logits=[(4, 0)]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
def test_the_mean_is_the_same_in_every_cut(isa: str, chunk: int) -> None:
    """A text alone in one step, and the same one in chunks beside others: the same bytes."""
    rng = np.random.default_rng(7)
    x, other = rng.standard_normal((2, 100, 37), np.float32)
    device, plan = native.make_device(isa), native.Plan()
    rows, sums = native.Rows(37, 210), native.Rows(37, 4)
    native.add_pool_mean(plan, device, rows, sums)
    fill(rows, x)
    step = make_step(device, [100], rows=[2], logits=[(99, 0)])
    alone = native.PooledStep(step, 37)
    run(plan, step)
    np.testing.assert_allclose(alone.numpy()[0], x.mean(axis=0, dtype=np.float64), atol=1e-6)

    for start in range(0, 100, chunk):
        part = x[start : start + chunk]
        fill(rows, np.concatenate([other, part]))
        is_last = start + chunk >= 100
        step = make_step(
            device,
            [100, len(part)],
            computed=[0, start],
            rows=[2, 3],
            logits=[(99, 0), (99 + len(part), 1)] if is_last else [(99, 0)],
        )
        pooled = native.PooledStep(step, 37)
        run(plan, step)
    assert pooled.numpy()[1].tobytes() == alone.numpy()[0].tobytes()
