"""Golden logits of the tiny checkpoints, computed once by transformers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from helpers.tiny_models import tiny_weights

POSITIONS = [0, 1, 7, 8, 9, 15, 16, 23, 31, 39]
"""Rows of the prompt whose logits are kept: first, last, and around windows and blocks."""


def golden_path(case: str) -> Path:
    """The file of a case, in tests/golden."""
    return Path(__file__).parent.parent / "golden" / f"{case}.npz"


def weights_digest(case: str) -> str:
    """Hash of all weights, to tell a changed generator from a changed model."""
    digest = hashlib.sha256()
    for name, values in sorted(tiny_weights(case).items()):
        digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()


def load_golden(case: str) -> tuple[list[int], np.ndarray]:
    """Token ids [40] and logits float32 [len(POSITIONS), V].

    Raises:
        AssertionError: The weights are not those the golden file was made of.
    """
    with np.load(golden_path(case)) as golden:
        assert str(golden["weights"]) == weights_digest(case), f"run make_golden.py again: {case}"
        return golden["token_ids"].tolist(), golden["logits"]
