"""How fast this machine's kernels multiply: one large matrix, by type of number."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from twostep import _native as native
from twostep.ops.cpu.weights import CpuWeights
from twostep.ops.formats import FORMATS
from twostep.ops.protocol import LinearPrecision, RawTensor

SIDE = 2048
TOKENS = 128
"""Rows of the other matrix: enough that a weight is used many times once it was read."""
ROUNDS = 3

KINDS: tuple[tuple[str, str, LinearPrecision], ...] = (
    ("int8", "Q8_0", "int8"),
    ("bf16", "BF16", "bf16"),
    ("fp32", "F32", "bf16"),
)
"""(type of number, format of the weights, precision of the kernels)."""


def measure_matmul(device: Any, num_threads: int) -> dict[str, float]:
    """FLOP/s of the linear kernels on so many threads, by type of number; best of three runs."""
    return {
        dtype: _measure(device, num_threads, weights, precision)
        for dtype, weights, precision in KINDS
    }


def _measure(device: Any, num_threads: int, weights: str, precision: LinearPrecision) -> float:
    entry = FORMATS[weights]
    num_bytes = SIDE * SIDE // entry.block_length * entry.layout.itemsize
    raw = RawTensor(
        name="w", format=weights, shape=(SIDE, SIDE), data=np.zeros(num_bytes, dtype=np.uint8)
    )
    weight = CpuWeights(device, num_threads).linear([raw], precision=precision)
    plan, stream = native.Plan(), native.Stream(num_threads)
    act = native.ActBuffer(weight.act_form, SIDE, TOKENS)
    native.add_linear(plan, device, act, weight.native, None, native.Rows(SIDE, TOKENS))
    one_request = [np.array(values, dtype=np.int32) for values in ([0, TOKENS], [TOKENS], [0])]
    nothing = np.zeros(0, dtype=np.int32)
    blocks = np.zeros((1, TOKENS), dtype=np.int32)
    step = native.make_step(device, TOKENS, *one_request, nothing, nothing, blocks, 1)
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        stream.wait(stream.launch(plan, step))
        best = min(best, time.perf_counter() - started)
    return 2 * TOKENS * SIDE * SIDE / best
