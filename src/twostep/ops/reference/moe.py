"""Mixture of experts: which experts a token takes, and with what weight."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostep.ops.reference.rounding import Float32Array


def route(
    router_logits: NDArray[Any], top_k: int, *, norm_topk_prob: bool
) -> tuple[NDArray[np.int64], Float32Array]:
    """Softmax over all experts, then the best ``top_k``; ties go to the lower id.

    Args:
        router_logits: [T, E].
        norm_topk_prob: scale the chosen weights of a token to sum to 1.

    Returns:
        experts int64 [T, top_k], ascending ids; weights float32 [T, top_k].
    """
    wide = np.asarray(router_logits, dtype=np.float64)
    probs = np.exp(wide - wide.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    # Sorted by the logits, not the probabilities: those may tie where their logits do not.
    best = np.argsort(-wide, axis=-1, kind="stable")[:, :top_k]
    experts = np.sort(best, axis=-1)
    weights = np.take_along_axis(probs, experts, axis=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return experts, weights.astype(np.float32)
