"""Finding added tokens in text, before anything else is done to it."""

from __future__ import annotations

import re
from collections.abc import Mapping


class AddedTokenMatcher:
    """Finds added tokens in raw text: leftmost first, the longest at each place."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self._ids = {text: token_id for text, token_id in added.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        # A one-character token must be tried wherever a longer one starts with the same character.
        for start in list(lengths):
            if start[0] in lengths:
                lengths[start] |= lengths[start[0]]
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        starts = sorted(self._lengths, key=len, reverse=True)
        self._start = re.compile("|".join(map(re.escape, starts))) if starts else None

    def split(self, text: str) -> list[str | int]:
        """The text as plain stretches (str, never empty) and ids of added tokens (int)."""
        if self._start is None:
            return [text] if text else []
        parts: list[str | int] = []
        plain = position = 0
        while found := self._start.search(text, position):
            begin = found.start()
            token_id, size = self._longest_at(text, begin, found.group())
            if token_id is None:
                position = begin + 1
                continue
            if begin > plain:
                parts.append(text[plain:begin])
            parts.append(token_id)
            plain = position = begin + size
        if plain < len(text):
            parts.append(text[plain:])
        return parts

    def _longest_at(self, text: str, begin: int, start: str) -> tuple[int | None, int]:
        for size in self._lengths[start]:
            token_id = self._ids.get(text[begin : begin + size])
            if token_id is not None:
                return token_id, size
        return None, 0
