"""Hands the tensors of a checkpoint to a backend: checked, requantised if asked, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec.structs
import numpy as np

from twostep.config.model import ModelConfig
from twostep.contracts.errors import ModelFileError, UnsupportedModelError, UsageError
from twostep.models.loader.checkpoint import Checkpoint
from twostep.ops.formats import (
    FORMATS,
    QUANTIZATIONS,
    dequantize,
    packed_bytes,
    requantize,
)
from twostep.ops.protocol import LinearPrecision, RawTensor, Weight, WeightFactory

_TOP = ("model.embed_tokens.weight", "lm_head.weight", "embeddings.word_embeddings.weight")
_NEVER_QUANTIZED = (
    "mlp.gate.weight",
    "embeddings.position_embeddings.weight",
    "embeddings.token_type_embeddings.weight",
)

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all) after each."""


class WeightLoader:
    """What a model's constructor builds its weights with.

    Names are those of ``Checkpoint``, without ``.weight``.

    Args:
        checkpoint: Where the tensors come from.
        factory: The backend that packs them.
        precision: Of activations in quantised layers: int8 in groups of 32, or bf16; "auto" is
            int8. Layers of float weights always take bf16.
        quantization: ``q8_0``, ``q4_0`` or ``q4_1``: linear layers stored in more bits than that
            are quantised. Embeddings and the output layer get no fewer than 8 bits.
        progress: Told after each tensor.
        with_output_layer: Whether an untied output layer is wanted.

    Raises:
        UsageError: Unknown ``quantization``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        factory: WeightFactory,
        *,
        precision: Literal["auto", "int8", "bf16"] = "auto",
        quantization: str | None = None,
        progress: Progress | None = None,
        with_output_layer: bool = True,
    ) -> None:
        self.with_output_layer = with_output_layer
        self.checkpoint = checkpoint
        self.config: ModelConfig = checkpoint.config
        self._factory = factory
        self._precision = precision
        self._target = quantization_format(quantization)
        self._progress = progress
        self._done = 0

    def linear(
        self, names: list[str], rows: list[int], width: int, *, quantizable: bool = True
    ) -> Weight:
        """Matrices [rows_i, width] stacked row-wise for ``ops.linear``."""
        target = self._target if quantizable else None
        parts = [
            self._load(name, (count, width), target)
            for name, count in zip(names, rows, strict=True)
        ]
        weight = self._factory.linear(parts, precision=self._choose(parts))
        self._finish(parts)
        return weight

    def gated(self, gate: str, up: str, rows: int, width: int) -> tuple[Weight, Weight]:
        """The pair [rows, width] for ``ops.gated_linear``."""
        parts = [self._load(name, (rows, width), self._target) for name in (gate, up)]
        weights = self._factory.gated(*parts, precision=self._choose(parts))
        self._finish(parts)
        return weights

    def embedding(self, name: str, rows: int, width: int, *, tied: bool) -> Weight:
        """The table [rows, width]; if ``tied``, it is the output layer too."""
        raw = self._load(name, (rows, width), self._target and "Q8_0")
        weight = self._factory.embedding(raw, tied=tied, precision=self._choose([raw]))
        self._finish([raw])
        return weight

    def output(self, name: str, rows: int, width: int) -> Weight:
        """The output layer of an untied model, for ``ops.logits``."""
        raw = self._load(name, (rows, width), self._target and "Q8_0")
        weight = self._factory.linear([raw], precision=self._choose([raw]))
        self._finish([raw])
        return weight

    def vector(self, name: str, size: int) -> Weight:
        """A norm weight [size]."""
        raw = self._load(name, (size,), None)
        weight = self._factory.vector(raw)
        self._finish([raw])
        return weight

    def positions(
        self, positions: str, segments: str, rows: int, num_segments: int, width: int
    ) -> Weight:
        """The table [rows, width] for ``ops.add_positions``; segment 0, which all are, is in it."""
        parts = [
            self._load(positions, (rows, width), None),
            self._load(segments, (num_segments, width), None),
        ]
        values = dequantize(parts[0]) + dequantize(parts[1])[0]
        table = msgspec.structs.replace(
            parts[0], format="F32", data=np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        )
        weight = self._factory.vector(table)
        self._finish(parts)
        return weight

    def biases(self, names: list[str], sizes: list[int]) -> Weight:
        """Bias vectors, one after the other as the rows of a stacked matrix are."""
        parts = [
            requantize(self._load(name, (size,), None, suffix="bias"), "F32")
            for name, size in zip(names, sizes, strict=True)
        ]
        weight = self._factory.vector(_concatenate(parts))
        self._finish(parts)
        return weight

    def has(self, name: str, suffix: str = "weight") -> bool:
        """Whether the checkpoint has this tensor."""
        return f"{name}.{suffix}" in self.checkpoint.names

    def _load(
        self, name: str, shape: tuple[int, ...], target: str | None, suffix: str = "weight"
    ) -> RawTensor:
        raw = self.checkpoint.tensor(f"{name}.{suffix}")
        path = self.checkpoint.path
        if raw.shape != shape:
            raise ModelFileError(
                f"{path}: {raw.name}: shape {list(raw.shape)} but the configuration says "
                f"{list(shape)}; the two do not belong together, download the model again"
            )
        if not self._factory.is_finite(raw):
            raise ModelFileError(
                f"{path}: {raw.name}: has NaN or infinite weights; "
                "the file is corrupt, download it again"
            )
        if target is None or not _is_wider(raw, target):
            return raw
        return self._requantize(raw, target)

    def _requantize(self, raw: RawTensor, target: str) -> RawTensor:
        path, shape = self.checkpoint.path, raw.shape
        if shape[-1] % FORMATS[target].block_length:
            raise UnsupportedModelError(
                f"{path}: {raw.name}: rows of {shape[-1]} weights cannot be quantised in blocks "
                f"of {FORMATS[target].block_length}; leave out --quantization"
            )
        packed = requantize(raw, target)
        if not self._factory.is_finite(packed):
            raise UnsupportedModelError(
                f"{path}: {raw.name}: weights beyond the range of {target}'s scales; "
                "leave out --quantization"
            )
        return packed

    def _choose(self, parts: list[RawTensor]) -> LinearPrecision:
        quantized = all(FORMATS[part.format].is_quantized for part in parts)
        return "int8" if quantized and self._precision != "bf16" else "bf16"

    def _finish(self, parts: list[RawTensor]) -> None:
        for part in parts:
            self.checkpoint.release(part.name)
        self._done += len(parts)
        if self._progress is not None:
            self._progress(self._done, self.num_tensors)

    @property
    def num_tensors(self) -> int:
        """Tensors in all, for the progress bar."""
        return len(self.checkpoint.names)


def quantization_format(quantization: str | None) -> str | None:
    """The weight format that ``--quantization`` means; None for none.

    Raises:
        UsageError: Unknown word.
    """
    if quantization is None:
        return None
    if quantization.lower() not in QUANTIZATIONS:
        raise UsageError(
            f"--quantization {quantization}: unknown; use one of {', '.join(QUANTIZATIONS)}"
        )
    return QUANTIZATIONS[quantization.lower()]


def estimate_packed_bytes(checkpoint: Checkpoint, quantization: str | None = None) -> int:
    """Bytes that the weights will take in memory, after ``--quantization``."""
    target = quantization_format(quantization)
    if target is None:
        return checkpoint.weight_bytes
    total = 0
    for name in checkpoint.names:
        raw = checkpoint.tensor(name)
        stored = stored_format(raw, target)
        is_kept = stored == raw.format
        total += int(raw.data.size) if is_kept else packed_bytes(stored, raw.shape)
    return total


def stored_format(raw: RawTensor, target: str | None) -> str:
    """The format that a tensor has in memory when linear layers are quantised to ``target``.

    Embeddings and the output layer get no fewer than 8 bits, routers of experts and embeddings of
    positions and segments stay as they are, and nothing gets more than it had.
    """
    if target is None or len(raw.shape) != 2 or raw.name.endswith(_NEVER_QUANTIZED):
        return raw.format
    is_top = raw.name in _TOP
    wanted = "Q8_0" if is_top else target
    fits = raw.shape[-1] % FORMATS[wanted].block_length == 0
    return wanted if fits and _is_wider(raw, wanted) else raw.format


def _is_wider(raw: RawTensor, target: str) -> bool:
    """Whether ``target`` takes fewer bits: quantising never makes a tensor larger."""
    return FORMATS[raw.format].bits_per_weight > FORMATS[target].bits_per_weight


def _concatenate(parts: list[RawTensor]) -> RawTensor:
    size = sum(math.prod(part.shape) for part in parts)
    return RawTensor(
        name=parts[0].name,
        format="F32",
        shape=(size,),
        data=np.concatenate([part.data for part in parts]),
    )
