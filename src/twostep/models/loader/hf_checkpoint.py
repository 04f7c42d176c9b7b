"""A directory in Hugging Face layout as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec.structs
import numpy as np

from twostep.config.model import ModelConfig
from twostep.models.loader.checkpoint import TokenizerSource
from twostep.models.loader.errors import missing
from twostep.models.loader.hf_config import model_config_from_hf
from twostep.models.loader.json_file import read_json
from twostep.models.loader.safetensors import (
    SafetensorsEntry,
    SafetensorsFile,
    open_safetensors,
)
from twostep.ops.formats import dequantize
from twostep.ops.protocol import RawTensor

# The language model of a multimodal checkpoint, in the spellings of transformers 4 and 5.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    # Checkpoints without an output layer, as embedding models are saved.
    ("layers.", "model.layers."),
    ("embed_tokens.", "model.embed_tokens."),
    ("norm.", "model.norm."),
    # BERT under a head of its own, and its norms as the first files named them.
    ("bert.", ""),
)
_PARAMETERS = (".weight", ".bias")
_ENDINGS = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))


class HFCheckpoint:
    """Implements ``Checkpoint`` over ``config.json`` and safetensors files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = read_json(path / "config.json")
        self.config = model_config_from_hf(path / "config.json", self.metadata)
        generation = path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = (
            read_json(generation) if generation.exists() else {}
        )
        self.tokenizer = TokenizerSource(directory=path)
        self._entries: dict[str, tuple[SafetensorsFile, SafetensorsEntry]] = {}
        for name, entry in open_safetensors(path).items():
            logical = _logical_name(name)
            if _is_used(logical, self.config):
                self._entries[logical] = entry
        self.names = frozenset(self._entries)
        self.weight_bytes = sum(entry.nbytes for _, entry in self._entries.values())

    def tensor(self, name: str) -> RawTensor:
        """See ``Checkpoint.tensor``."""
        if name not in self._entries:
            raise missing(self.path, f"tensor {name}")
        file, entry = self._entries[name]
        raw = RawTensor(name=name, format=entry.dtype, shape=entry.shape, data=file.data(entry))
        if self.config.architecture == "gemma3" and name.endswith("norm.weight"):
            return _plus_one(raw)
        return raw

    def release(self, name: str) -> None:
        """See ``Checkpoint.release``."""
        file, entry = self._entries[name]
        file.release(entry)

    def close(self) -> None:
        """See ``Checkpoint.close``."""
        for file in {id(file): file for file, _ in self._entries.values()}.values():
            file.close()


def _logical_name(name: str) -> str:
    for ending, replacement in _ENDINGS:
        if name.endswith(ending):
            name = name.removesuffix(ending) + replacement
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _is_used(name: str, config: ModelConfig) -> bool:
    """Whether the language model reads it: no vision tower, buffers, or copy of a tied table."""
    if config.is_encoder:
        return name.startswith(("embeddings.", "encoder.layer.")) and name.endswith(_PARAMETERS)
    if name.startswith("lm_head."):
        return not config.tie_word_embeddings
    parts = ("model.layers.", "model.embed_tokens.", "model.norm.")
    return name.startswith(parts) and name.endswith(_PARAMETERS)


def _plus_one(raw: RawTensor) -> RawTensor:
    """Gemma stores its norm weights less one."""
    values = dequantize(raw) + np.float32(1)
    return msgspec.structs.replace(raw, format="F32", data=values.view(np.uint8).reshape(-1))
