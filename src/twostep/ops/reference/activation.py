"""Activations of the feed-forward layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostep.config.model import Activation
from twostep.ops.reference.rounding import Float32Array


def silu(x: NDArray[Any]) -> NDArray[np.float64]:
    """``x * sigmoid(x)``."""
    wide = np.asarray(x, dtype=np.float64)
    # exp of minus the magnitude never overflows.
    decay = np.exp(-np.abs(wide))
    return wide * np.where(wide >= 0, 1.0, decay) / (1.0 + decay)


def gelu_tanh(x: NDArray[Any]) -> NDArray[np.float64]:
    """The tanh approximation of GELU (Hendrycks & Gimpel 2016)."""
    wide = np.asarray(x, dtype=np.float64)
    inner = np.sqrt(2.0 / np.pi) * (wide + 0.044715 * wide**3)
    result: NDArray[np.float64] = 0.5 * wide * (1.0 + np.tanh(inner))
    return result


def gelu(x: NDArray[Any]) -> Float32Array:
    """The exact GELU, ``x * Phi(x)`` (Hendrycks & Gimpel 2016); float32 of the same shape."""
    wide = np.asarray(x, dtype=np.float64)
    erf = np.vectorize(math.erf, otypes=[np.float64])
    result: Float32Array = (0.5 * wide * (1.0 + erf(wide / math.sqrt(2.0)))).astype(np.float32)
    return result


def gated(gate: NDArray[Any], up: NDArray[Any], activation: Activation) -> Float32Array:
    """``act(gate) * up``, float32 of the same shape."""
    act = silu(gate) if activation == "silu" else gelu_tanh(gate)
    return (act * np.asarray(up, dtype=np.float64)).astype(np.float32)
