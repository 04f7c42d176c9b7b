"""Makes tests/golden/embeddings.npz from transformers, the oracle. Run as make_golden.py is.

For each case of ``helpers.golden.EMBEDDING_CASES`` and each of its texts: the last layer's hidden
states, pooled in every way that the case is used with, computed in float32, not normalised.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from helpers.golden import EMBEDDING_CASES, embedding_texts, embeddings_path, write_embedding_model
from transformers import AutoModel


def main() -> None:
    """Write the one file."""
    arrays: dict[str, np.ndarray] = {}
    for case in EMBEDDING_CASES:
        with tempfile.TemporaryDirectory() as folder:
            directory = write_embedding_model(Path(folder), case, dtype="F32", spelling="v5")
            model = AutoModel.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        for number, ids in enumerate(embedding_texts(case)):
            with torch.no_grad():
                hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
            pooled = {"cls": hidden[0], "last": hidden[-1]}
            pooled["mean"] = hidden.astype(np.float64).mean(axis=0).astype(np.float32)
            for kind in EMBEDDING_CASES[case]:
                arrays[f"{case}/{kind}/{number}"] = pooled[kind]
    np.savez_compressed(embeddings_path(), **arrays)
    print(embeddings_path().stat().st_size, "bytes,", len(arrays), "vectors")


if __name__ == "__main__":
    main()
