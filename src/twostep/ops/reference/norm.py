"""RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostep.ops.reference.rounding import Float32Array


def rms_norm(x: NDArray[Any], weight: NDArray[Any], eps: float) -> Float32Array:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, in float64; float32 like ``x``."""
    wide = np.asarray(x, dtype=np.float64)
    mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
    result: Float32Array = (wide / np.sqrt(mean_square + eps) * weight).astype(np.float32)
    return result


def layer_norm(
    x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any], eps: float
) -> Float32Array:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis, in float64; float32."""
    wide = np.asarray(x, dtype=np.float64)
    centred = wide - np.mean(wide, axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    result: Float32Array = (centred / np.sqrt(variance + eps) * weight + bias).astype(np.float32)
    return result
