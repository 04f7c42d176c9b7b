"""Which bytes each token id stands for: the one table that all decoding goes through."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Literal

TokenAlphabet = Literal["byte_level", "sentencepiece", "wordpiece"]

SPACE_MARK = "\u2581"
"""Stands for a space in SentencePiece vocabularies."""

WORDPIECE_MARK = "##"
"""Begins a piece that goes on with a word (BERT); all others begin one."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_level_alphabet() -> dict[int, int]:
    """Code point -> byte, of the 256 characters in which byte-level BPE spells bytes.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the code
    points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {byte: byte for byte in printable}
    table.update({256 + i: byte for i, byte in enumerate(others)})
    return table


class TokenBytes:
    """Bytes of every token of one vocabulary, worked out on first use.

    ``text_of`` gives the vocabulary's spelling of an id, or None when there is no such id.
    ``literal_ids`` are spelled as they are (added tokens); ``strip_leading_space`` says that
    decoding drops one space at the very beginning of a text (the prefix the encoder put there).
    """

    def __init__(
        self,
        alphabet: TokenAlphabet,
        vocab_size: int,
        text_of: Callable[[int], str | None],
        literal_ids: frozenset[int] = frozenset(),
        *,
        strip_leading_space: bool = False,
    ) -> None:
        self.strip_leading_space = strip_leading_space
        self.vocab_size = vocab_size
        self._alphabet = byte_level_alphabet() if alphabet == "byte_level" else None
        self._is_wordpiece = alphabet == "wordpiece"
        self._text_of = text_of
        self._literal_ids = literal_ids
        self._known: dict[int, bytes] = {}
        self._known_texts: dict[int, str | None] = {}

    def text(self, token_id: int) -> str | None:
        """Text of ``token_id`` if its bytes are whole characters, else None."""
        try:
            return self._known_texts[token_id]
        except KeyError:
            text = None
            with contextlib.suppress(UnicodeDecodeError):
                text = self[token_id].decode("utf-8")
            self._known_texts[token_id] = text
            return text

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of ``token_id``; empty for an id outside the vocabulary."""
        piece = self._known.get(token_id)
        if piece is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            piece = self._known[token_id] = self._spell(token_id)
        return piece

    def _spell(self, token_id: int) -> bytes:
        text = self._text_of(token_id)
        if text is None:
            return b""
        if token_id in self._literal_ids:
            return text.encode("utf-8", "replace")
        if self._alphabet is not None:
            return self._spell_byte_level(text)
        if self._is_wordpiece:
            goes_on = text.startswith(WORDPIECE_MARK)
            text = text.removeprefix(WORDPIECE_MARK) if goes_on else f" {text}"
            return text.encode("utf-8", "replace")
        if byte := _BYTE_TOKEN.match(text):
            return bytes([int(byte[1], 16)])
        return text.replace(SPACE_MARK, " ").encode("utf-8", "replace")

    def _spell_byte_level(self, text: str) -> bytes:
        assert self._alphabet is not None
        try:
            return bytes([self._alphabet[ord(char)] for char in text])
        except KeyError:  # not spelled in the byte alphabet: an added token
            return text.encode("utf-8", "replace")
