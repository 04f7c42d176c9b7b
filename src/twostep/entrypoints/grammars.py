"""What compiles grammars, on the engine's side and on the front end's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.models.loader.open import open_checkpoint
from twostep.structured_output.compiler import LLGuidanceCompiler
from twostep.structured_output.tokenizer import Vocabulary

if TYPE_CHECKING:
    from twostep.entrypoints.text_side import TextSide


def compiler_for_path(path: Path, vocab_size: int) -> LLGuidanceCompiler:
    """For who has no tokenizer: it is read from the model's files at the first constraint."""

    def load() -> Vocabulary:
        from twostep.entrypoints.text_side import load_text_side

        with contextlib.closing(open_checkpoint(path)) as checkpoint:
            return vocabulary_of(load_text_side(checkpoint), vocab_size)

    return LLGuidanceCompiler(load)


def compiler_for_text(text: TextSide, vocab_size: int) -> LLGuidanceCompiler:
    """For who has a tokenizer."""
    return LLGuidanceCompiler(lambda: vocabulary_of(text, vocab_size))


def vocabulary_of(text: TextSide, vocab_size: int) -> Vocabulary:
    """The tokens of a model with ``vocab_size`` logits, as constraints see them."""
    table = text.tokenizer.token_bytes
    return Vocabulary(
        token_bytes=[table[i] for i in range(min(table.vocab_size, vocab_size))],
        special_ids=text.tokenizer.special.ids,
        end_ids=tuple(text.eos_token_ids),
        size=vocab_size,
    )
