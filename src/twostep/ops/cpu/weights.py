"""Packs a checkpoint's tensors into the layouts of the chosen kernels."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostep import _native as native
from twostep.ops.formats import dequantize
from twostep.ops.protocol import LinearPrecision, RawTensor


class CpuWeight(msgspec.Struct, frozen=True):
    """A packed matrix [out_features, in_features]."""

    native: Any
    out_features: int
    in_features: int

    @property
    def act_form(self) -> Any:
        """The form of activations its kernel reads."""
        return self.native.act_form


class GatedWeight(msgspec.Struct, frozen=True):
    """gate and up, interleaved so that one task streams one region."""

    native: Any
    out_features: int
    in_features: int

    @property
    def act_form(self) -> Any:
        """The form of activations its kernel reads."""
        return self.native.act_form


class CpuWeights:
    """The ``WeightFactory`` of the CPU backend. Packing runs on ``num_threads`` threads."""

    def __init__(self, device: Any, num_threads: int) -> None:
        self._device = device
        self._num_threads = num_threads
        self.arena = native.Arena()
        """Where they lie."""
        self.num_bytes = 0
        """Bytes of everything packed so far."""

    def is_finite(self, tensor: RawTensor) -> bool:
        """See ``WeightFactory.is_finite``; other Python threads run meanwhile."""
        part = (tensor.format, 1, math.prod(tensor.shape), tensor.data)
        return bool(native.is_finite(part, self._num_threads))

    def linear(self, parts: list[RawTensor], *, precision: LinearPrecision) -> CpuWeight:
        """See ``WeightFactory.linear``."""
        packed = native.Weight(
            self._device,
            [_part(part) for part in parts],
            precision,
            self._num_threads,
            self.arena,
        )
        self.num_bytes += packed.nbytes
        return CpuWeight(packed, sum(part.shape[0] for part in parts), parts[0].shape[1])

    def gated(
        self, gate: RawTensor, up: RawTensor, *, precision: LinearPrecision
    ) -> tuple[GatedWeight, GatedWeight]:
        """See ``WeightFactory.gated``: both handles are the same packed pair."""
        packed = native.gated_weight(
            self._device, _part(gate), _part(up), precision, self._num_threads, self.arena
        )
        self.num_bytes += packed.nbytes
        pair = GatedWeight(packed, gate.shape[0], gate.shape[1])
        return pair, pair

    def embedding(self, table: RawTensor, *, tied: bool, precision: LinearPrecision) -> CpuWeight:
        """See ``WeightFactory.embedding``: packed like any matrix; ``embed`` unpacks rows."""
        del tied  # one layout serves both readers
        return self.linear([table], precision=precision)

    def vector(self, tensor: RawTensor) -> Any:
        """See ``WeightFactory.vector``."""
        values = dequantize(tensor)
        self.num_bytes += values.nbytes
        return native.Vector(np.ascontiguousarray(values.reshape(-1), dtype=np.float32))


def _part(tensor: RawTensor) -> tuple[str, int, int, NDArray[np.uint8]]:
    rows, columns = tensor.shape
    return tensor.format, rows, columns, tensor.data
