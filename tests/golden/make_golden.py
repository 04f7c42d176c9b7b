"""Makes the golden logits of tests/models from transformers, the oracle.

Run from the root of the repository, in an environment with torch and transformers 5:

    PYTHONPATH=src:tests python tests/golden/make_golden.py

The weights are not stored: ``helpers.tiny_models`` makes them again, and each golden file holds
their hash. A file has the logits (float32) of some positions of one prompt, computed in float32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from helpers.golden import POSITIONS, golden_path, weights_digest
from helpers.tiny_models import CASES, prompt, tiny_hf_dir
from transformers import AutoModelForCausalLM


def main() -> None:
    """Write one ``.npz`` for each case beside this file."""
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            directory = tiny_hf_dir(Path(folder), case, dtype="F32", spelling="v5")
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        ids = prompt(case)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].numpy()
        np.savez_compressed(
            golden_path(case),
            token_ids=np.array(ids, dtype=np.int32),
            logits=logits[POSITIONS].astype(np.float32),
            weights=np.array(weights_digest(case)),
        )
        print(case, golden_path(case).stat().st_size, "bytes, largest", np.abs(logits).max())


if __name__ == "__main__":
    main()
