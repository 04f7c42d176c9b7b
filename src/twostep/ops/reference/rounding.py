"""Rounding float32 values to what a narrower format can hold, staying in float32."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
StorageDtype = Literal["fp32", "bf16", "fp16"]


def round_bf16(x: NDArray[Any]) -> Float32Array:
    """``x`` rounded to bfloat16 (nearest, ties to even), as float32 of the same shape."""
    values = np.ascontiguousarray(x, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = bits + (((bits >> 16) & np.uint32(1)) + np.uint32(0x7FFF))
    result = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(values), values, result)


def round_fp16(x: NDArray[Any]) -> Float32Array:
    """``x`` rounded to IEEE half precision (nearest, ties to even), as float32."""
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=np.float32).astype(np.float16).astype(np.float32)


def round_to(x: NDArray[Any], dtype: StorageDtype) -> Float32Array:
    """``x`` as a store into ``dtype`` and a load from it would give it; float32."""
    if dtype == "bf16":
        return round_bf16(x)
    if dtype == "fp16":
        return round_fp16(x)
    return np.asarray(x, dtype=np.float32)
