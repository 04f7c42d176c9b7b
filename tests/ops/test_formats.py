"""Weight formats: unpacking against hand-built blocks and the gguf package, packing, NaN check."""

from __future__ import annotations

import msgspec.structs
import numpy as np
import pytest

from twostep import _native as native
from twostep.ops.cpu.weights import CpuWeights
from twostep.ops.formats import (
    FORMATS,
    dequantize,
    is_finite,
    packed_bytes,
    quantize,
    requantize,
)
from twostep.ops.protocol import RawTensor

QUANTIZED = [name for name, entry in FORMATS.items() if entry.is_quantized]


def random_raw(name: str, rows: int, width: int, seed: int = 0) -> RawTensor:
    """Random bytes with finite scales: every bit pattern of the integers is valid."""
    rng = np.random.default_rng(seed)
    entry = FORMATS[name]
    data = rng.integers(0, 256, packed_bytes(name, (rows, width)), dtype=np.uint8)
    blocks = data.view(entry.layout)
    for field in ("d", "m"):
        if field in entry.layout.names:
            blocks[field] = rng.normal(size=len(blocks)) * 0.1
    return RawTensor(name="w", format=name, shape=(rows, width), data=data)


def test_block_sizes() -> None:
    sizes = {name: (entry.block_length, entry.block_bytes) for name, entry in FORMATS.items()}
    assert sizes == {
        "F32": (1, 4),
        "F16": (1, 2),
        "BF16": (1, 2),
        "Q8_0": (32, 34),
        "Q4_0": (32, 18),
        "Q4_1": (32, 20),
        "Q5_0": (32, 22),
        "Q5_1": (32, 24),
        "Q4_K": (256, 144),
        "Q5_K": (256, 176),
        "Q6_K": (256, 210),
    }


def test_packed_bytes_refuses_broken_rows() -> None:
    assert packed_bytes("Q4_1", (3, 64)) == 3 * 2 * 20
    with pytest.raises(ValueError, match="not a multiple"):
        packed_bytes("Q4_K", (3, 64))


@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantize_equals_the_gguf_package(name: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    raw = random_raw(name, 5, 768)
    row_bytes = packed_bytes(name, (768,))
    expected = quants.dequantize(raw.data.reshape(5, row_bytes), gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantize(raw), expected)


def test_dequantize_float_formats() -> None:
    values = np.array([[1.5, -2.0, 0.15625, 3e4]], dtype=np.float32)
    for name, data in {
        "F32": values.view(np.uint8),
        "F16": values.astype(np.float16).view(np.uint8),
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
    }.items():
        raw = RawTensor(name="w", format=name, shape=(1, 4), data=data.reshape(-1))
        atol = 50 if name == "BF16" else 0
        np.testing.assert_allclose(dequantize(raw), values, rtol=0, atol=atol)


def test_dequantize_q4_0_by_hand() -> None:
    """Low nibbles are the first 16 weights, high nibbles the last; both less 8, times d."""
    block = np.zeros(1, dtype=FORMATS["Q4_0"].layout)
    block["d"] = 0.5
    block["qs"] = np.arange(16) | ((15 - np.arange(16)) << 4)
    raw = RawTensor(name="w", format="Q4_0", shape=(1, 32), data=block.view(np.uint8))
    expected = np.concatenate([np.arange(16) - 8, 15 - np.arange(16) - 8]) * 0.5
    np.testing.assert_array_equal(dequantize(raw)[0], expected)


def hard_values(seed: int) -> np.ndarray:
    """Normal weights plus the awkward: zeros, ties, constants, one spike, tiny, huge."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(40, 64)).astype(np.float32)
    values[0] = 0
    values[1] = np.resize([0.5, -0.5, 1.5, 127.0], 64)
    values[2] = 3.25
    values[3] = 0
    values[3, 7] = -9
    values[4] *= 1e-3
    values[5] *= 1e3
    values[6] = np.resize([1.0, -1.0], 64)
    return values


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantize_equals_the_gguf_package(name: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    values = hard_values(1)
    expected = quants.quantize(values, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(quantize(values, name), expected.reshape(-1))


@pytest.mark.parametrize(("name", "steps"), [("Q8_0", 127), ("Q4_0", 8), ("Q4_1", 15)])
def test_quantize_stays_within_a_step(name: str, steps: int) -> None:
    values = hard_values(2)
    raw = RawTensor(name="w", format=name, shape=values.shape, data=quantize(values, name))
    groups = values.reshape(-1, 32)
    reach = np.ptp(groups, axis=1) if name == "Q4_1" else np.abs(groups).max(axis=1)
    # Q4_0 reaches -8 but only +7 steps, so a weight may lie a whole step off.
    step = (reach / steps)[:, None] * (1.01 if name == "Q4_0" else 0.51)
    limit = step + np.abs(groups).max(axis=1)[:, None] * 2e-3 + 1e-7
    assert (np.abs(dequantize(raw).reshape(-1, 32) - groups) <= limit).all()


@pytest.mark.parametrize("source", ["F32", "F16", "BF16", "Q6_K"])
@pytest.mark.parametrize("target", ["Q8_0", "Q4_1", "F16", "BF16", "F32"])
def test_requantize_converts_by_value(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, and equal to doing it in one go."""
    rng = np.random.default_rng(3)
    values = rng.normal(size=(7, 256)).astype(np.float32)
    raw = (
        random_raw("Q6_K", 7, 256)
        if source == "Q6_K"
        else requantize(
            RawTensor(
                name="w", format="F32", shape=(7, 256), data=values.view(np.uint8).reshape(-1)
            ),
            source,
        )
    )
    whole = requantize(raw, target)
    assert whole.format == target
    assert whole.data.size == packed_bytes(target, (7, 256))
    spread = np.abs(dequantize(raw)).max()
    loss = {"Q8_0": 0.005, "Q4_1": 0.08, "F16": 1e-3, "BF16": 4e-3, "F32": 0.0}[target]
    np.testing.assert_allclose(dequantize(whole), dequantize(raw), rtol=0, atol=loss * spread)
    monkeypatch.setattr("twostep.ops.formats._WEIGHTS_AT_ONCE", 600)
    np.testing.assert_array_equal(requantize(raw, target).data, whole.data)


@pytest.mark.parametrize("name", list(FORMATS))
def test_is_finite_sees_nan_and_inf(name: str) -> None:
    raw = random_raw(name, 3, 512) if name in QUANTIZED else None
    if raw is None:
        values = np.ones((3, 512), dtype=np.float32)
        f32 = RawTensor(
            name="w", format="F32", shape=(3, 512), data=values.view(np.uint8).reshape(-1)
        )
        raw = requantize(f32, name)
    assert is_finite(raw)
    fields = [field for field in ("v", "d", "m") if field in FORMATS[name].layout.names]
    for field in fields:
        for bad in (np.nan, np.inf, -np.inf):
            broken = msgspec.structs.replace(raw, data=raw.data.copy())
            blocks = broken.data.view(FORMATS[name].layout)
            if name == "BF16":
                bits = np.array([bad], np.float32).view(np.uint32) >> 16
                blocks[field][-1] = bits[0]
            else:
                blocks[field][-1] = bad
            assert not is_finite(broken)


@pytest.mark.parametrize("name", list(FORMATS))
def test_native_is_finite_looks_at_every_piece(name: str) -> None:
    """Threads share a tensor in pieces of a MiB: its first block, its last, and around an edge."""
    factory = CpuWeights(native.make_device(""), 2)
    layout = FORMATS[name].layout
    rows = 5 * (1 << 19) // layout.itemsize
    if name in QUANTIZED:
        raw = random_raw(name, rows, FORMATS[name].block_length)
    else:
        largest = {"F32": 0x7F7FFFFF, "F16": 0xFBFF, "BF16": 0xFF7F}[name]
        words = np.full(rows, largest, "<u4" if name == "F32" else "<u2")
        raw = RawTensor(name="w", format=name, shape=(rows, 1), data=words.view(np.uint8))
    assert factory.is_finite(raw)
    edge = (1 << 20) // layout.itemsize
    for field in [field for field in ("v", "d", "m") if field in layout.names]:
        offset, size = layout.fields[field][1], layout.fields[field][0].itemsize
        bad = {"F32": 0xFF800000, "BF16": 0x7F81}.get(name, 0x7C00)  # -inf, NaN, inf
        for block in (0, edge - 1, edge, rows - 1):
            data = raw.data.copy()
            at = block * layout.itemsize + offset
            data[at : at + size] = np.frombuffer(bad.to_bytes(size, "little"), np.uint8)
            broken = msgspec.structs.replace(raw, data=data)
            assert not factory.is_finite(broken)
            assert not is_finite(broken)
