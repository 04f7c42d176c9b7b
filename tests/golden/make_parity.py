"""Greedy continuations of the two real models by transformers, in float32, for tests/parity.

    python tests/golden/make_parity.py FOLDER     (needs torch, transformers, gguf)

FOLDER holds the catalogue's GGUF files. transformers unpacks their weights to float32, so both
sides multiply the same numbers. For every position the gap between the two best logits is kept:
where an engine ever chooses otherwise, the two must lie closer than its numeric error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MODELS = {
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
}
NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics say that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils when",
    "A recipe for pancakes:\n\nIngredients:\n-",
    "Question: Why is the sky blue?\nAnswer:",
    "La Révolution française commença",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. The",
    "In the beginning",
    "import numpy as np\n\ndef softmax(x):",
    "My favourite book is",
    "The mitochondria is the powerhouse of",
    "To be, or not to be, that is",
    "Es war einmal ein König, der",
    "Breaking news: scientists have discovered",
    "List of planets in order from the sun: Mercury, Venus,",
    "She opened the old wooden door and",
]


def main() -> int:
    """Write parity-<model>.json beside this file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(sys.argv[1])
    torch.set_grad_enabled(False)
    for name, file in MODELS.items():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        model.eval()
        cases = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt)["input_ids"]
            tokens, gaps = greedy(model, torch.tensor([ids]))
            cases.append({"prompt_token_ids": ids, "token_ids": tokens, "gaps": gaps})
            print(name, len(cases), repr(tokenizer.decode(tokens)[:60]), flush=True)
        path = Path(__file__).parent / f"parity-{name}.json"
        path.write_text(json.dumps(cases, separators=(",", ":")))
    return 0


def greedy(model, ids):  # type: ignore[no-untyped-def]
    """64 tokens, ties to the lowest id, and the gaps between the two best logits."""
    import torch

    tokens, gaps, cache = [], [], None
    for _ in range(NEW_TOKENS):
        out = model(ids, past_key_values=cache, use_cache=True)
        logits, cache = out.logits[0, -1], out.past_key_values
        best = torch.topk(logits, 2).values
        token = int(torch.argmax(logits))
        tokens.append(token)
        gaps.append(round(float(best[0] - best[1]), 6))
        ids = torch.tensor([[token]])
    return tokens, gaps


if __name__ == "__main__":
    sys.exit(main())
