"""Reader of GGUF files (versions 2 and 3): header, metadata, tensor directory.

The file is not trusted: every count, length and offset is checked against the size of the file
before anything is allocated for it. Long arrays (vocabularies) are only measured; they are decoded
when somebody asks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostep import _native as native
from twostep.contracts.errors import ModelFileError, UnsupportedModelError
from twostep.models.loader.errors import corrupt, truncated
from twostep.models.loader.mapped_file import MappedFile
from twostep.ops.formats import FORMATS, packed_bytes

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1 << 16

TENSOR_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""ggml's numbers; those without an entry in ``FORMATS`` get an error that names them."""

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFTensor(msgspec.Struct, frozen=True):
    """One entry of the tensor directory, checked to lie inside the file."""

    name: str
    format: str
    shape: tuple[int, ...]
    """Outermost first (the file stores the reverse)."""
    start: int
    """Byte offset in the file."""
    nbytes: int


class _Array(msgspec.Struct, frozen=True):
    """An array that was measured but not decoded."""

    kind: int
    count: int
    start: int


class GGUFMetadata(Mapping[str, Any]):
    """Metadata as plain Python values; arrays become lists when first looked up."""

    def __init__(self, reader: _Reader, values: dict[str, Any]) -> None:
        self._reader = reader
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = self._reader.decode_array(value, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def length(self, key: str) -> int | None:
        """Elements of an array, without decoding it; None for no array."""
        value = self._values.get(key)
        if isinstance(value, _Array):
            return value.count
        return len(value) if isinstance(value, list) else None


class GGUFFile:
    """An open GGUF file.

    Attributes:
        metadata: Mapping of keys to plain Python values.
        tensors: {name: entry}, in the order of the file.

    Raises:
        ModelFileError: Not a GGUF file, truncated, or corrupt; names the field.
        UnsupportedModelError: A version or tensor format that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            reader = _Reader(self._file)
            num_tensors, num_keys = _read_header(reader)
            self.metadata = GGUFMetadata(reader, _read_metadata(reader, num_keys))
            alignment = _alignment(path, self.metadata)
            self.tensors = _read_directory(reader, num_tensors, alignment)
        except BaseException:
            self._file.close()
            raise

    def data(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the file."""
        return self._file.bytes[tensor.start : tensor.start + tensor.nbytes]

    def release(self, tensor: GGUFTensor) -> None:
        """Take a tensor's bytes out of resident memory."""
        self._file.release(tensor.start, tensor.nbytes)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


class _Reader:
    """A cursor that never passes the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.path = file.path
        self.size = file.size
        self.position = 0

    def require(self, count: int, field: str) -> None:
        """Make sure that ``count`` bytes follow."""
        if count > self.size - self.position:
            raise truncated(self.path, field, self.position + count, self.size)

    def u32(self, field: str) -> int:
        self.require(4, field)
        (value,) = _U32.unpack_from(self.file.buffer, self.position)
        self.position += 4
        return int(value)

    def u64(self, field: str) -> int:
        self.require(8, field)
        (value,) = _U64.unpack_from(self.file.buffer, self.position)
        self.position += 8
        return int(value)

    def text(self, field: str, limit: int | None = None) -> str:
        length = self.u64(field)
        if limit is not None and length > limit:
            raise corrupt(self.path, field, f"a name of {length} bytes")
        self.require(length, field)
        start = self.position
        self.position += length
        return self._decode(start, length, field)

    def value(self, kind: int, field: str) -> Any:
        """A scalar, a string or an ``_Array``; the cursor ends behind it."""
        if kind == _STRING:
            return self.text(field)
        if kind == _ARRAY:
            return self._measure_array(field)
        if kind not in _SCALARS:
            raise corrupt(self.path, field, f"unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self.require(dtype.itemsize, field)
        value = np.frombuffer(self.file.buffer, dtype, 1, self.position)[0].item()
        self.position += dtype.itemsize
        return value

    def decode_array(self, array: _Array, field: str) -> list[Any]:
        if array.kind != _STRING:
            dtype = np.dtype(_SCALARS[array.kind])
            values = np.frombuffer(self.file.buffer, dtype, array.count, array.start)
            return list(values.tolist())
        return self._decode_strings(array, field)

    def _decode_strings(self, array: _Array, field: str) -> list[str]:
        try:
            texts: list[str] = native.read_strings(self.file.bytes, array.start, array.count)
        except UnicodeDecodeError as error:
            raise corrupt(self.path, field, "text that is not UTF-8") from error
        return texts

    def _measure_array(self, field: str) -> _Array:
        kind = self.u32(field)
        count = self.u64(field)
        start = self.position
        if kind == _STRING:
            self._skip_strings(count, field)
        elif kind in _SCALARS:
            nbytes = count * np.dtype(_SCALARS[kind]).itemsize
            self.require(nbytes, field)
            self.position += nbytes
        else:
            raise corrupt(self.path, field, f"an array of unknown type {kind}")
        return _Array(kind, count, start)

    def _skip_strings(self, count: int, field: str) -> None:
        self.require(count * 8, field)
        end = native.skip_strings(self.file.bytes, self.position, count)
        if end > self.size:
            raise truncated(self.path, field, end, self.size)
        self.position = end

    def _decode(self, start: int, length: int, field: str) -> str:
        try:
            return str(self.file.buffer[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise corrupt(self.path, field, "text that is not UTF-8") from error


def _read_header(reader: _Reader) -> tuple[int, int]:
    """Check magic and version; counts of tensors and of metadata keys."""
    path = reader.path
    if reader.size < 4 or reader.file.bytes[:4].tobytes() != MAGIC:
        raise ModelFileError(
            f"{path}: magic: not a GGUF file (it does not begin with 'GGUF'); "
            "give a .gguf file or download it again"
        )
    reader.position = 4
    version = reader.u32("version")
    if version not in (2, 3):
        kind = "big-endian, which" if version in (2 << 24, 3 << 24) else f"{version}, which"
        raise UnsupportedModelError(
            f"{path}: version: {kind} is not supported; convert the model to GGUF version 3"
        )
    num_tensors, num_keys = reader.u64("tensor_count"), reader.u64("metadata_kv_count")
    # The least an entry takes: a key of one byte with a one-byte value; a tensor of one dimension.
    for field, count, least in (
        ("tensor_count", num_tensors, 33),
        ("metadata_kv_count", num_keys, 14),
    ):
        if count * least > reader.size:
            raise corrupt(path, field, f"{count} entries cannot fit in {reader.size} bytes")
    return num_tensors, num_keys


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(count):
        key = reader.text(f"metadata key {index}", MAX_NAME_BYTES)
        if key in values:
            raise corrupt(reader.path, key, "the key appears twice")
        values[key] = reader.value(reader.u32(key), key)
    return values


def _alignment(path: Path, metadata: GGUFMetadata) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = isinstance(alignment, int) and 0 < alignment <= 1 << 20
    if not valid or alignment & (alignment - 1):
        raise corrupt(path, "general.alignment", f"{alignment!r} is not a power of two")
    return int(alignment)


def _read_directory(reader: _Reader, count: int, alignment: int) -> dict[str, GGUFTensor]:
    """All entries, with offsets counted from the start of the file."""
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for index in range(count):
        name = reader.text(f"tensor name {index}", MAX_NAME_BYTES)
        if name in entries:
            raise corrupt(reader.path, name, "the tensor appears twice")
        entries[name] = (*_read_entry(reader, name), _read_offset(reader, name, alignment))
    data_start = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, (format_name, shape, offset) in entries.items():
        try:
            nbytes = packed_bytes(format_name, shape)
        except ValueError as error:
            raise corrupt(reader.path, name, str(error)) from error
        start = data_start + offset
        if start + nbytes > reader.size:
            raise truncated(reader.path, name, start + nbytes, reader.size)
        tensors[name] = GGUFTensor(name, format_name, shape, start, nbytes)
    _check_overlap(reader.path, list(tensors.values()))
    return tensors


def _read_entry(reader: _Reader, name: str) -> tuple[str, tuple[int, ...]]:
    """Format and shape (outermost first) of one tensor."""
    num_dimensions = reader.u32(name)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise corrupt(reader.path, name, f"{num_dimensions} dimensions")
    shape = tuple(reader.u64(name) for _ in range(num_dimensions))[::-1]
    if not all(shape) or math.prod(shape) > 8 * reader.size:
        raise corrupt(reader.path, name, f"shape {list(shape)} cannot fit in {reader.size} bytes")
    number = reader.u32(name)
    format_name = TENSOR_TYPES.get(number)
    if format_name is None:
        raise corrupt(reader.path, name, f"unknown tensor type {number}")
    if format_name not in FORMATS:
        raise UnsupportedModelError(
            f"{reader.path}: {name}: format {format_name} is not supported; "
            f"use a file in one of {', '.join(FORMATS)}"
        )
    return format_name, shape


def _read_offset(reader: _Reader, name: str, alignment: int) -> int:
    offset = reader.u64(name)
    if offset % alignment:
        raise corrupt(reader.path, name, f"offset {offset} is not a multiple of {alignment}")
    return offset


def _check_overlap(path: Path, tensors: list[GGUFTensor]) -> None:
    end = 0
    for tensor in sorted(tensors, key=lambda entry: entry.start):
        if tensor.start < end:
            raise corrupt(path, tensor.name, f"offset {tensor.start} lies inside another tensor")
        end = tensor.start + tensor.nbytes
