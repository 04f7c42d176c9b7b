"""Golden logits of the tiny checkpoints, computed once by transformers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from helpers.tiny_bert import bert_ids, tiny_bert_dir
from helpers.tiny_models import prompt, tiny_hf_dir, tiny_weights

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


EMBEDDING_CASES = {"bert": ("cls", "mean"), "llama": ("last", "mean"), "qwen3": ("last", "mean")}
"""Models whose vectors are kept, and how they are pooled."""


def embeddings_path() -> Path:
    """The file of all vectors, in tests/golden."""
    return Path(__file__).parent.parent / "golden" / "embeddings.npz"


def embedding_texts(case: str) -> list[list[int]]:
    """Token ids of a case's texts: short, some blocks long and, of BERT, over a segment."""
    if case == "bert":
        return [bert_ids(length) for length in (3, 19, 64, 300)]
    ids = prompt(case)
    return [ids[:1], ids[5:21], ids]


def write_embedding_model(
    folder: Path, case: str, *, dtype: str = "BF16", spelling: str = "v4"
) -> Path:
    """The directory of a case's model. BERT is in F32 whatever ``dtype`` says."""
    if case == "bert":
        return tiny_bert_dir(folder)
    return tiny_hf_dir(folder, case, dtype=dtype, spelling=spelling)


def load_embeddings(case: str, kind: str) -> list[np.ndarray]:
    """The vector of each text of ``embedding_texts``, float32 [H], not normalised."""
    with np.load(embeddings_path()) as golden:
        return [golden[f"{case}/{kind}/{i}"] for i in range(len(embedding_texts(case)))]
