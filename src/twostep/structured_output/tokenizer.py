"""What llguidance must know about a vocabulary: the bytes of every token, and which are special."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import llguidance

_SPECIAL_MARK = 0xFF
"""llguidance marks special tokens with this first byte; no text in UTF-8 has it."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model."""

    token_bytes: Sequence[bytes]
    """Entry i: the bytes that token i adds to a text; empty if it adds none."""
    special_ids: frozenset[int]
    """Tokens that are not text: only a grammar that names them allows them."""
    end_ids: tuple[int, ...]
    """Tokens that end an answer, whatever the request says."""
    size: int
    """Of the model's logits; ids behind ``token_bytes`` are padding."""

    @property
    def num_words(self) -> int:
        """int32 words of a bitmask."""
        return -(-self.size // 32)


def build_ll_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """llguidance's view of a vocabulary. Takes 0.1 s for 49,152 tokens, and holds the GIL.

    Token ``vocabulary.size``, which no model has, stands for the end of the text: ends differ
    from request to request, so ``LLGuidanceGrammar`` sees to them.
    """
    from llguidance import LLTokenizer

    # Without slices: they halve no mask that was measured, and double the time of this.
    return LLTokenizer(_Wrapper(vocabulary), slices=[])  # type: ignore[arg-type]


class _Wrapper:
    """What ``LLTokenizer`` asks of its argument."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        size = vocabulary.size
        tokens = [_text_bytes(piece) for piece in vocabulary.token_bytes[:size]]
        self.tokens = [*tokens, *[b""] * (size + 1 - len(tokens))]
        self.eos_token_id = size
        self.special_token_ids = sorted(i for i in vocabulary.special_ids if i < size)

    def __call__(self, text: str) -> list[int]:
        """Only asked to force a canonical spelling, which no grammar of ours does."""
        return []


def _text_bytes(piece: bytes) -> bytes:
    """A token that begins with 0xFF is never text, and must not look like a special one."""
    return b"" if piece[:1] == bytes([_SPECIAL_MARK]) else piece
