"""Rotary position embedding (Su et al. 2021) and the ways to stretch it to longer contexts.

All backends take their tables from :func:`rope_tables`, so they rotate by the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostep.config.model import RopeConfig
from twostep.ops.reference.rounding import Float32Array


def inv_freq(rope: RopeConfig) -> NDArray[np.float64]:
    """Radians per position of each pair, after scaling: float64 [rotary_dim / 2]."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    base = rope.theta**-exponents
    if rope.scaling == "linear":
        base = base / rope.factor
    elif rope.scaling == "llama3":
        base = _llama3(base, rope)
    elif rope.scaling == "yarn":
        base = _yarn(base, rope)
    if rope.freq_factors:
        base = base / np.asarray(rope.freq_factors, dtype=np.float64)
    return base


def attention_factor(rope: RopeConfig) -> float:
    """What multiplies cos and sin: 1 except for YaRN (Peng et al. 2023, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.scaling != "yarn" or rope.factor <= 1.0:
        return 1.0
    return 0.1 * math.log(rope.factor) + 1.0


def rope_tables(rope: RopeConfig, max_position: int) -> tuple[Float32Array, Float32Array]:
    """cos and sin of every position and pair.

    The angle is a float32 product of a float32 frequency, as in the code the models were trained
    with: far out its rounding is part of the model.

    Returns:
        cos, sin: float32 [max_position, rotary_dim / 2], ``attention_factor`` included.
    """
    frequencies = inv_freq(rope).astype(np.float32)
    positions = np.arange(max_position, dtype=np.float32)
    angles = (positions[:, None] * frequencies[None, :]).astype(np.float64)
    factor = attention_factor(rope)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(
        np.float32
    )


def apply_rope(
    x: NDArray[Any], cos: Float32Array, sin: Float32Array, *, interleaved: bool = False
) -> Float32Array:
    """Rotate the first ``2 * cos.shape[-1]`` dimensions of each head, pass on the rest.

    Args:
        x: [T, heads, D].
        cos, sin: [T, rotary_dim / 2], the table rows of the T positions.
        interleaved: pairs are (2i, 2i+1) instead of (i, i + rotary_dim/2).

    Returns:
        float32 [T, heads, D].
    """
    out = np.array(x, dtype=np.float32)
    half = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = np.asarray(x[..., first], np.float64), np.asarray(x[..., second], np.float64)
    c, s = cos[:, None, :].astype(np.float64), sin[:, None, :].astype(np.float64)
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out


def _llama3(base: NDArray[np.float64], rope: RopeConfig) -> NDArray[np.float64]:
    """Llama 3.1: long waves are slowed by ``factor``, short ones kept, with a ramp between."""
    turns = rope.original_max_position * base / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    return (1.0 - keep) * base / rope.factor + keep * base


def _yarn(base: NDArray[np.float64], rope: RopeConfig) -> NDArray[np.float64]:
    """YaRN: dimensions that turn often are kept, those that turn seldom are interpolated."""

    def dimension(turns: float) -> float:
        """Index (in dimensions, a float) of the pair that turns so often in the old context."""
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), rope.rotary_dim - 1)
    ramp = (np.arange(rope.rotary_dim // 2) - low) / max(high - low, 0.001)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    return (1.0 - keep) * base / rope.factor + keep * base
