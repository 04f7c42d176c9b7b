"""Ids of tricky texts against Hugging Face's tokenizers of the two real models.

Runs for the models that lie in the store (``twostep pull``) or in TWOSTEP_TEST_MODELS.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from twostep.frontend.tokenizer import Tokenizer

HERE = Path(__file__).parent
TEXTS: list[str] = json.loads((HERE / "tricky_texts.json").read_text(encoding="utf-8"))
GOLDEN: dict[str, list[list[int]]] = json.loads(
    (HERE / "golden" / "tokenizers.json").read_text(encoding="utf-8")
)


def model_file(name: str) -> Path:
    """A model's GGUF file; skips the test when it is on no disk."""
    from twostep.entrypoints.catalogue import find
    from twostep.entrypoints.store import path_of

    model = find(name)
    assert model is not None
    folder = os.environ.get("TWOSTEP_TEST_MODELS")
    places = [path_of(model), *([Path(folder) / model.filename] if folder else [])]
    for place in places:
        if place.is_file():
            return place
    pytest.skip(f"{name} is not on disk: twostep pull {name}")


def load(name: str) -> Tokenizer:
    from twostep.models.loader.gguf import GGUFFile

    return Tokenizer.from_gguf_metadata(GGUFFile(model_file(name)).metadata)


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_ids_are_the_oracles(name: str) -> None:
    tokenizer = load(name)
    for text, expected in zip(TEXTS, GOLDEN[name], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        if "\u2581" not in text:
            assert tokenizer.decode(expected, skip_special_tokens=False) == text
