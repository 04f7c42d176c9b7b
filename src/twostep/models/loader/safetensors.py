"""Reader of safetensors files: one file, or shards listed in ``model.safetensors.index.json``.

As with GGUF, the header is not trusted: lengths and offsets are checked before they are used.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostep.contracts.errors import ModelFileError, UnsupportedModelError
from twostep.models.loader.errors import corrupt, missing, truncated
from twostep.models.loader.json_file import parse_json, read_json
from twostep.models.loader.mapped_file import MappedFile

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000

_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
READABLE = ("F32", "F16", "BF16")


class SafetensorsEntry(msgspec.Struct, frozen=True):
    """One tensor of a header, checked to lie inside its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    nbytes: int


class SafetensorsFile:
    """An open safetensors file.

    Attributes:
        tensors: {name: entry}.

    Raises:
        ModelFileError: Truncated or corrupt; names the field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            self.tensors = _read_entries(self._file)
        except BaseException:
            self._file.close()
            raise

    def data(self, entry: SafetensorsEntry) -> NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the file.

        Raises:
            UnsupportedModelError: The dtype is not F32, F16 or BF16.
        """
        if entry.dtype not in READABLE:
            raise UnsupportedModelError(
                f"{self.path}: {entry.name}: dtype {entry.dtype} is not supported; "
                f"use a checkpoint in one of {', '.join(READABLE)}"
            )
        return self._file.bytes[entry.start : entry.start + entry.nbytes]

    def release(self, entry: SafetensorsEntry) -> None:
        """Take a tensor's bytes out of resident memory."""
        self._file.release(entry.start, entry.nbytes)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def open_safetensors(directory: Path) -> dict[str, tuple[SafetensorsFile, SafetensorsEntry]]:
    """Every tensor of a directory: its file and entry, by name.

    Raises:
        ModelFileError: No weights, a missing shard, or a bad file.
    """
    index = directory / INDEX_NAME
    if not index.exists():
        return _merge([SafetensorsFile(_single_file(directory))])
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise corrupt(index, "weight_map", "not a table of tensors")
    files: dict[str, SafetensorsFile] = {}
    try:
        for shard in sorted({str(name) for name in weight_map.values()}):
            files[shard] = SafetensorsFile(_shard_path(directory, index, shard))
        for name, shard in weight_map.items():
            if name not in files[str(shard)].tensors:
                raise missing(directory / str(shard), f"tensor {name}")
        return _merge(list(files.values()))
    except BaseException:
        for file in files.values():
            file.close()
        raise


def _single_file(directory: Path) -> Path:
    path = directory / SINGLE_NAME
    if path.exists():
        return path
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    if any(directory.glob("pytorch_model*.bin")):
        raise ModelFileError(
            f"{directory}: only pytorch_model.bin, which can carry code and is never read; "
            "use a checkpoint in safetensors format"
        )
    raise missing(directory, f"{SINGLE_NAME} (or {INDEX_NAME})")


def _shard_path(directory: Path, index: Path, shard: str) -> Path:
    if Path(shard).name != shard or shard in ("", ".", ".."):
        raise corrupt(index, "weight_map", f"{shard!r} is not a plain file name")
    path = directory / shard
    if not path.exists():
        raise missing(path, "the shard")
    return path


def _merge(
    files: list[SafetensorsFile],
) -> dict[str, tuple[SafetensorsFile, SafetensorsEntry]]:
    merged: dict[str, tuple[SafetensorsFile, SafetensorsEntry]] = {}
    for file in files:
        for name, entry in file.tensors.items():
            if name in merged:
                raise corrupt(file.path, name, "the tensor is in two shards")
            merged[name] = (file, entry)
    return merged


def _read_entries(file: MappedFile) -> dict[str, SafetensorsEntry]:
    if file.size < 8:
        raise truncated(file.path, "header length", 8, file.size)
    length = int.from_bytes(file.buffer[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise corrupt(file.path, "header length", f"{length} bytes")
    if 8 + length > file.size:
        raise truncated(file.path, "header", 8 + length, file.size)
    header = parse_json(file.buffer[8 : 8 + length], file.path, "header", unique=True)
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, 8 + length) for name, value in header.items()}
    end = 0
    for entry in sorted(entries.values(), key=lambda item: (item.start, item.nbytes)):
        if entry.start < end:
            raise corrupt(file.path, entry.name, "data_offsets lie inside another tensor")
        end = entry.start + entry.nbytes
    return entries


def _entry(file: MappedFile, name: str, value: Any, data_start: int) -> SafetensorsEntry:
    if not isinstance(value, dict):
        raise corrupt(file.path, name, "not a tensor entry")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str):
        raise corrupt(file.path, name, "dtype is missing")
    if not _whole_numbers(shape) or len(shape) > 8:
        raise corrupt(file.path, name, f"shape {shape!r}")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt(file.path, name, f"data_offsets {offsets!r}")
    begin, end = offsets
    item = _ITEM_BYTES.get(dtype)
    # Types that are not known may pass: nobody needs to read them.
    if item is not None and math.prod(shape) * item != end - begin:
        raise corrupt(file.path, name, f"shape {shape} of {dtype} is not {end - begin} bytes")
    if data_start + end > file.size:
        raise truncated(file.path, name, data_start + end, file.size)
    return SafetensorsEntry(name, dtype, tuple(shape), data_start + begin, end - begin)


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
