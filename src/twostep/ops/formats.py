"""Weight formats: their blocks, and NumPy code that unpacks and packs them.

A row of a quantised matrix is cut into blocks of ``block_length`` weights; each block carries its
own scales. The layouts are those of GGUF files, so a tensor's bytes are used as the file has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import msgspec
import msgspec.structs
import numpy as np
from numpy.typing import NDArray

from twostep.ops.protocol import RawTensor

Float32Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Format(msgspec.Struct, frozen=True):
    """How weights lie in memory."""

    name: str
    block_length: int
    """Weights of one block."""
    block_bytes: int
    layout: Any
    """numpy dtype of one block."""

    @property
    def is_quantized(self) -> bool:
        """Whether blocks carry scales (everything but F32, F16 and BF16)."""
        return self.block_length > 1

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage for each weight, scales included."""
        return 8 * self.block_bytes / self.block_length


def _format(name: str, block_length: int, *fields: tuple[Any, ...]) -> Format:
    layout = np.dtype(list(fields))
    return Format(name, block_length, layout.itemsize, layout)


FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        _format("F32", 1, ("v", "<f4")),
        _format("F16", 1, ("v", "<f2")),
        _format("BF16", 1, ("v", "<u2")),
        _format("Q8_0", 32, ("d", "<f2"), ("qs", "i1", 32)),
        _format("Q4_0", 32, ("d", "<f2"), ("qs", "u1", 16)),
        _format("Q4_1", 32, ("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)),
        _format("Q5_0", 32, ("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)),
        _format("Q5_1", 32, ("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)),
        _format("Q4_K", 256, ("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)),
        _format(
            "Q5_K",
            256,
            ("d", "<f2"),
            ("m", "<f2"),
            ("scales", "u1", 12),
            ("qh", "u1", 32),
            ("qs", "u1", 128),
        ),
        _format(
            "Q6_K", 256, ("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")
        ),
    )
}
"""Every weight format that twostep reads, by name."""

QUANTIZATIONS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
"""What ``--quantization`` accepts, and the format it means."""

_WEIGHTS_AT_ONCE = 1 << 22
"""Weights converted at a time by :func:`requantize`: bounds its scratch memory to some 50 MB."""


def packed_bytes(format_name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of ``shape`` (outermost first).

    Raises:
        ValueError: The innermost dimension is not a multiple of the format's block.
    """
    entry = FORMATS[format_name]
    if not shape:
        return entry.block_bytes
    if shape[-1] % entry.block_length:
        raise ValueError(
            f"rows of {shape[-1]} weights are not a multiple of {format_name}'s "
            f"block of {entry.block_length}"
        )
    return math.prod(shape) // entry.block_length * entry.block_bytes


def dequantize(raw: RawTensor) -> Float32Array:
    """The weights of ``raw`` as float32 of its shape; exact for every format."""
    blocks = _blocks(raw)
    return _DEQUANTIZE[raw.format](blocks).reshape(raw.shape)


def quantize(values: NDArray[Any], format_name: str) -> Bytes:
    """Pack float32 ``values`` [..., K] (K a multiple of 32) as Q8_0, Q4_0 or Q4_1.

    Rounds as ggml's reference quantiser does, so the result equals a file that
    ``llama-quantize --pure`` wrote. Weights too large for a half-precision scale make it infinite.

    Returns:
        The bytes, one-dimensional.
    """
    groups = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, 32)
    with np.errstate(over="ignore"):
        blocks = _QUANTIZE[format_name](groups)
    return cast(Bytes, blocks.view(np.uint8).reshape(-1))


def requantize(raw: RawTensor, format_name: str) -> RawTensor:
    """``raw`` in another format, converted a few rows at a time.

    F32, F16 and BF16 as well as Q8_0, Q4_0 and Q4_1 can be written.
    """
    if raw.format == format_name:
        return raw
    source, target = FORMATS[raw.format], FORMATS[format_name]
    width = raw.shape[-1]
    rows = math.prod(raw.shape[:-1])
    source_row = width // source.block_length * source.block_bytes
    target_row = packed_bytes(format_name, (width,))
    out = np.empty(rows * target_row, dtype=np.uint8)
    step = max(1, _WEIGHTS_AT_ONCE // width)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        chunk = raw.data[start * source_row : stop * source_row]
        values = dequantize(msgspec.structs.replace(raw, shape=(stop - start, width), data=chunk))
        packed = quantize(values, format_name) if target.is_quantized else _cast(values, target)
        out[start * target_row : stop * target_row] = packed
    return msgspec.structs.replace(raw, format=format_name, data=out)


def is_finite(raw: RawTensor) -> bool:
    """Whether no weight of ``raw`` is NaN or infinite.

    Of a quantised tensor only the scales are read: its integers cannot be bad. Exponent bits are
    looked at as integers, so this runs at the speed of memory.
    """
    entry = FORMATS[raw.format]
    data = raw.data.reshape(-1)
    if not entry.is_quantized:
        exponent = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[raw.format]
        return _exponents_below(data.view("<u4" if raw.format == "F32" else "<u2"), exponent)
    # Scales are half precision at even offsets of blocks of even size.
    halves = data.view("<u2").reshape(-1, entry.block_bytes // 2)
    offsets = [
        entry.layout.fields[field][1] for field in ("d", "m") if field in entry.layout.fields
    ]
    return all(_exponents_below(halves[:, offset // 2], 0x7C00) for offset in offsets)


def _exponents_below(bits: NDArray[Any], exponent: int) -> bool:
    """Whether no value has all the bits of ``exponent`` set (the mask of NaN and infinity)."""
    chunks = range(0, bits.size, _WEIGHTS_AT_ONCE)
    peaks = ((bits[i : i + _WEIGHTS_AT_ONCE] & exponent).max(initial=0) for i in chunks)
    return all(int(peak) != exponent for peak in peaks)


def _blocks(raw: RawTensor) -> Any:
    """``raw.data`` seen as an array of blocks (no copy)."""
    return raw.data.reshape(-1).view(FORMATS[raw.format].layout)


def _cast(values: Float32Array, target: Format) -> Bytes:
    """Float formats; BF16 to nearest, ties to even."""
    if target.name == "BF16":
        bits = values.view(np.uint32)
        halves = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        return halves.astype("<u2").view(np.uint8).reshape(-1)
    return values.astype(target.layout["v"]).view(np.uint8).reshape(-1)


# --- unpacking: blocks [B] → float32 [B, block_length] ---------------------------------------


def _scale(blocks: Any, field: str) -> Float32Array:
    return cast(Float32Array, blocks[field].astype(np.float32)[:, None])


def _nibbles(qs: Bytes) -> NDArray[np.uint8]:
    """[B, n] → [B, 2n]: first all low nibbles, then all high ones."""
    return np.concatenate([qs & 0x0F, qs >> 4], axis=-1)


def _from_floats(blocks: Any) -> Float32Array:
    return cast(Float32Array, blocks["v"].astype(np.float32))


def _from_bf16(blocks: Any) -> Float32Array:
    return cast(Float32Array, (blocks["v"].astype(np.uint32) << 16).view(np.float32))


def _from_q8_0(blocks: Any) -> Float32Array:
    return cast(Float32Array, _scale(blocks, "d") * blocks["qs"].astype(np.float32))


def _from_q4_0(blocks: Any) -> Float32Array:
    q = _nibbles(blocks["qs"]).astype(np.float32) - np.float32(8)
    return cast(Float32Array, _scale(blocks, "d") * q)


def _from_q4_1(blocks: Any) -> Float32Array:
    q = _nibbles(blocks["qs"]).astype(np.float32)
    return cast(Float32Array, _scale(blocks, "d") * q + _scale(blocks, "m"))


def _five_bits(blocks: Any) -> Float32Array:
    """Nibble i plus, as bit 4, bit i of the little-endian word ``qh``."""
    high = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    return cast(Float32Array, (_nibbles(blocks["qs"]) | (high << 4)).astype(np.float32))


def _from_q5_0(blocks: Any) -> Float32Array:
    return cast(Float32Array, _scale(blocks, "d") * (_five_bits(blocks) - np.float32(16)))


def _from_q5_1(blocks: Any) -> Float32Array:
    return cast(Float32Array, _scale(blocks, "d") * _five_bits(blocks) + _scale(blocks, "m"))


def _k_scales(blocks: Any) -> tuple[Float32Array, Float32Array]:
    """Scale and minimum of each of the 8 sub-blocks of 32: float32 [B, 8, 1] each.

    Twelve bytes hold eight 6-bit scales and eight 6-bit minima; the last four of each keep their
    two upper bits in the upper bits of the first eight bytes.
    """
    packed = blocks["scales"]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 0x0F) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    d = _scale(blocks, "d") * scales.astype(np.float32)
    m = _scale(blocks, "m") * minima.astype(np.float32)
    return d[:, :, None], m[:, :, None]


def _k_nibbles(blocks: Any) -> NDArray[np.uint8]:
    """[B, 8, 32]: 32 bytes hold sub-block 2j in their low and 2j + 1 in their high nibbles."""
    return _nibbles(blocks["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _from_q4_k(blocks: Any) -> Float32Array:
    d, m = _k_scales(blocks)
    return cast(Float32Array, d * _k_nibbles(blocks).astype(np.float32) - m)


def _from_q5_k(blocks: Any) -> Float32Array:
    d, m = _k_scales(blocks)
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high = (blocks["qh"][:, None, :] >> shifts) & 1
    return cast(Float32Array, d * (_k_nibbles(blocks) | (high << 4)).astype(np.float32) - m)


def _from_q6_k(blocks: Any) -> Float32Array:
    low = _nibbles(blocks["ql"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = (blocks["qh"].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).astype(np.float32) - np.float32(32)
    d = _scale(blocks, "d") * blocks["scales"].astype(np.float32)
    return cast(Float32Array, d[:, :, None] * q.reshape(-1, 16, 16))


_DEQUANTIZE: dict[str, Callable[[Any], Float32Array]] = {
    "F32": _from_floats,
    "F16": _from_floats,
    "BF16": _from_bf16,
    "Q8_0": _from_q8_0,
    "Q4_0": _from_q4_0,
    "Q4_1": _from_q4_1,
    "Q5_0": _from_q5_0,
    "Q5_1": _from_q5_1,
    "Q4_K": _from_q4_k,
    "Q5_K": _from_q5_k,
    "Q6_K": _from_q6_k,
}


# --- packing: float32 [B, 32] → blocks [B] ---------------------------------------------------


def _inverse(d: Float32Array) -> Float32Array:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _pack_nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return cast(Bytes, q[:, :16] | (q[:, 16:] << 4))


def _to_q8_0(groups: Float32Array) -> Any:
    blocks = np.zeros(len(groups), dtype=FORMATS["Q8_0"].layout)
    d = np.abs(groups).max(axis=1) / np.float32(127)
    scaled = groups * _inverse(d)[:, None]
    # C's roundf: halves go away from zero. Adding 0.5 in float64 is exact here.
    blocks["qs"] = np.trunc(scaled + np.copysign(0.5, scaled.astype(np.float64)))
    blocks["d"] = d
    return blocks


def _to_q4_0(groups: Float32Array) -> Any:
    blocks = np.zeros(len(groups), dtype=FORMATS["Q4_0"].layout)
    # The weight of greatest magnitude becomes exactly -8 steps.
    peak = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    d = peak / np.float32(-8)
    q = np.trunc(groups * _inverse(d) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    blocks["qs"] = _pack_nibbles(q)
    blocks["d"] = d[:, 0]
    return blocks


def _to_q4_1(groups: Float32Array) -> Any:
    blocks = np.zeros(len(groups), dtype=FORMATS["Q4_1"].layout)
    low = groups.min(axis=1, keepdims=True)
    d = (groups.max(axis=1, keepdims=True) - low) / np.float32(15)
    q = np.trunc((groups - low) * _inverse(d) + np.float32(0.5)).clip(0, 15).astype(np.uint8)
    blocks["qs"] = _pack_nibbles(q)
    blocks["d"], blocks["m"] = d[:, 0], low[:, 0]
    return blocks


_QUANTIZE: dict[str, Callable[[Float32Array], Any]] = {
    "Q8_0": _to_q8_0,
    "Q4_0": _to_q4_0,
    "Q4_1": _to_q4_1,
}
