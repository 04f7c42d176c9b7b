"""Writes GGUF version 3 files for tests; says nothing about whether their contents make sense."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPE_NUMBERS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to write; ``shape`` is outermost first, ``data`` any bytes-like array."""

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: list[Tensor], alignment: int = 32
) -> Path:
    """Write a file and return its path.

    bool, int (u32), float (f32), str and lists of str, int (i32) or float (f32) are understood.
    """
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    offset = 0
    blobs = [tensor.data.tobytes() for tensor in tensors]
    for tensor, blob in zip(tensors, blobs, strict=True):
        dimensions = tensor.shape[::-1]
        head += _string(tensor.name) + struct.pack("<I", len(dimensions))
        head += struct.pack(f"<{len(dimensions)}Q", *dimensions)
        head += struct.pack("<IQ", TYPE_NUMBERS[tensor.format], offset)
        offset += _padded(len(blob), alignment)
    with path.open("wb") as file:
        file.write(head.ljust(_padded(len(head), alignment), b"\0"))
        for blob in blobs:
            file.write(blob.ljust(_padded(len(blob), alignment), b"\0"))
    return path


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<I", 9) + _array(value)


def _array(values: list[Any]) -> bytes:
    first = values[0] if values else 0
    head = struct.pack("<IQ", {str: 8, float: 6}.get(type(first), 5), len(values))
    if isinstance(first, str):
        return head + b"".join(_string(text) for text in values)
    kind = "f" if isinstance(first, float) else "i"
    return head + struct.pack(f"<{len(values)}{kind}", *values)
