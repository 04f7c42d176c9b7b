"""Makes golden/tokenizers.json: ids of the tricky texts by Hugging Face's own GGUF conversion.

Usage: python tests/frontend/make_golden.py NAME=FILE.gguf [NAME=FILE.gguf ...]
Needs transformers, gguf and torch; the tests that read the file need none of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

HERE = Path(__file__).parent


def main(arguments: list[str]) -> None:
    """Write the golden file."""
    texts = json.loads((HERE / "tricky_texts.json").read_text(encoding="utf-8"))
    golden = {}
    for argument in arguments:
        name, _, file = argument.partition("=")
        path = Path(file)
        oracle: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        if name.startswith("smollm"):
            # The conversion forgets a rule of the model's own tokenizer.json: digits stand alone.
            digits = pre_tokenizers.Digits(individual_digits=True)
            words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        golden[name] = [oracle.encode(text, add_special_tokens=False) for text in texts]
    out = HERE / "golden" / "tokenizers.json"
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, ids)) + "\n]"
        for name, ids in golden.items()
    ]
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
