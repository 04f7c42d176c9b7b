"""Matrix products, and the int8 quantisation of activations that the fast kernels use."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from twostep.ops.reference.rounding import Float32Array, round_bf16

ActivationMode = Literal["f32", "bf16", "q8"]

GROUP = 32
"""Activations share one scale in groups of this many."""

_ROWS_AT_ONCE = 8192
"""Weight rows widened to float64 at a time, to bound memory on large vocabularies."""


def quantize_rows_q8(x: NDArray[Any]) -> tuple[NDArray[np.int8], Float32Array]:
    """Quantise each row to int8 in groups of 32.

    ``scale = max|x| / 127`` (float32), ``q = round_half_even(x / scale)``; a group of zeros has
    scale 0 and q 0.

    Args:
        x: [T, K], K a multiple of 32.

    Returns:
        q int8 [T, K] and scale float32 [T, K / 32].
    """
    rows, width = x.shape
    groups = np.asarray(x, dtype=np.float32).reshape(rows, width // GROUP, GROUP)
    scale = np.abs(groups).max(axis=-1) / np.float32(127.0)
    divisor = np.where(scale == 0, np.float32(1.0), scale)[..., None]
    q = np.rint(groups / divisor).clip(-127, 127).astype(np.int8)
    return q.reshape(rows, width), scale


def dequantize_rows_q8(q: NDArray[np.int8], scale: Float32Array) -> NDArray[np.float64]:
    """The values that :func:`quantize_rows_q8` kept: float64 [T, K], exact products."""
    rows, width = q.shape
    groups = q.reshape(rows, width // GROUP, GROUP).astype(np.float64)
    return (groups * scale.astype(np.float64)[..., None]).reshape(rows, width)


def activations(x: NDArray[Any], act: ActivationMode) -> NDArray[np.float64]:
    """``x`` [T, K] as a kernel of mode ``act`` sees it, in float64."""
    if act == "q8":
        return dequantize_rows_q8(*quantize_rows_q8(x))
    if act == "bf16":
        return round_bf16(x).astype(np.float64)
    return np.asarray(x, dtype=np.float32).astype(np.float64)


def linear(
    x: NDArray[Any],
    w: NDArray[Any],
    act: ActivationMode = "f32",
    bias: NDArray[Any] | None = None,
) -> Float32Array:
    """``x @ w.T + bias``, accumulated in float64, rounded once to float32.

    Args:
        x: [T, K].
        w: [N, K], the dequantised weights. For the bf16 kernels round them first (``round_bf16``).
        act: what the kernel does to the activations before it multiplies.
        bias: [N] or None.

    Returns:
        float32 [T, N].
    """
    inputs = activations(x, act)
    out = np.empty((x.shape[0], w.shape[0]), dtype=np.float32)
    for start in range(0, w.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        products = inputs @ w[part].astype(np.float64).T
        if bias is not None:
            products += np.asarray(bias[part], dtype=np.float64)
        out[:, part] = products
    return out


def softcap(x: Float32Array, cap: float) -> Float32Array:
    """``cap * tanh(x / cap)``; ``cap`` of 0 changes nothing (Gemma 2 and 3)."""
    if not cap:
        return x
    return (cap * np.tanh(x.astype(np.float64) / cap)).astype(np.float32)
