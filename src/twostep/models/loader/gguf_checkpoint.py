"""A GGUF file, or the parts of a split one, as a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostep.models.loader.checkpoint import TokenizerSource
from twostep.models.loader.errors import corrupt, missing
from twostep.models.loader.gguf import GGUFFile, GGUFTensor
from twostep.models.loader.gguf_config import ROPE_FACTORS, model_config_from_gguf
from twostep.models.loader.names import expert_name, hf_name
from twostep.ops.formats import dequantize
from twostep.ops.protocol import RawTensor

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFCheckpoint:
    """Implements ``Checkpoint`` over one or more mapped GGUF files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _open_parts(path)
        try:
            self._entries = _merge(self._files)
            self._init_facts()
        except BaseException:
            self.close()
            raise

    def _init_facts(self) -> None:
        self.metadata: Mapping[str, Any] = self._files[0].metadata
        self.generation_config: Mapping[str, Any] = {}
        self.tokenizer = TokenizerSource(gguf_metadata=self.metadata)
        tensors = {name: entry for name, (_, entry) in self._entries.items()}
        self.config = model_config_from_gguf(
            self.path, self.metadata, tensors, self._rope_factors()
        )
        self._logical = _logical_names(self.path, tensors, self.config.architecture)
        self.names = frozenset(self._logical)
        self.weight_bytes = sum(entry.nbytes for entry in tensors.values())

    def tensor(self, name: str) -> RawTensor:
        """See ``Checkpoint.tensor``."""
        if name not in self._logical:
            raise missing(self.path, f"tensor {name}")
        gguf_name, expert = self._logical[name]
        file, entry = self._entries[gguf_name]
        data, shape = file.data(entry), entry.shape
        if expert is not None:
            data, shape = _slice_expert(data, shape, expert)
        return RawTensor(name=name, format=entry.format, shape=shape, data=data)

    def release(self, name: str) -> None:
        """See ``Checkpoint.release``; of a stack of experts, with the last of them."""
        gguf_name, expert = self._logical[name]
        file, entry = self._entries[gguf_name]
        if expert is None or expert == entry.shape[0] - 1:
            file.release(entry)

    def close(self) -> None:
        """See ``Checkpoint.close``."""
        for file in self._files:
            file.close()

    def _rope_factors(self) -> tuple[float, ...]:
        if ROPE_FACTORS not in self._entries:
            return ()
        file, entry = self._entries[ROPE_FACTORS]
        if len(entry.shape) != 1 or entry.shape[0] > 4096:
            raise corrupt(self.path, ROPE_FACTORS, f"shape {list(entry.shape)}")
        raw = RawTensor(
            name=ROPE_FACTORS, format=entry.format, shape=entry.shape, data=file.data(entry)
        )
        return tuple(float(value) for value in dequantize(raw))


def _open_parts(path: Path) -> list[GGUFFile]:
    """The file, or all parts of the split file that ``path`` belongs to, in order."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [GGUFFile(path)]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count:
        raise corrupt(path, "file name", f"part {match[2]} of {match[3]}")
    parts = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.exists():
            raise missing(part, f"this part of {count}")
    files: list[GGUFFile] = []
    try:
        for number, part in enumerate(parts):
            files.append(GGUFFile(part))
            if files[-1].metadata.get("split.no", number) != number:
                raise corrupt(part, "split.no", f"is not {number}")
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _merge(files: list[GGUFFile]) -> dict[str, tuple[GGUFFile, GGUFTensor]]:
    merged: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
    for file in files:
        for name, entry in file.tensors.items():
            if name in merged:
                raise corrupt(file.path, name, "the tensor is in two parts")
            merged[name] = (file, entry)
    return merged


def _logical_names(
    path: Path, tensors: Mapping[str, GGUFTensor], architecture: str
) -> dict[str, tuple[str, int | None]]:
    """{name that models ask for: (GGUF name, index into a stack of experts)}."""
    logical: dict[str, tuple[str, int | None]] = {}
    for gguf_name, entry in tensors.items():
        name = hf_name(gguf_name, architecture)
        if name is not None:
            logical[name] = (gguf_name, None)
            continue
        parts = expert_name(gguf_name)
        if parts is None:
            continue
        if len(entry.shape) != 3 or entry.shape[0] > 65536:
            raise corrupt(path, gguf_name, f"shape {list(entry.shape)} is no stack of experts")
        before, after = parts
        for expert in range(entry.shape[0]):
            logical[f"{before}{expert}{after}"] = (gguf_name, expert)
    return logical


def _slice_expert(
    data: NDArray[np.uint8], shape: tuple[int, ...], expert: int
) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
    size = data.size // shape[0]
    return data[expert * size : (expert + 1) * size], shape[1:]
