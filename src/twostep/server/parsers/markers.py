"""Finds markers in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence


def is_cut_marker(text: str, position: int, markers: Sequence[str]) -> bool:
    """Whether the end of ``text``, from there on, may become a marker but is none yet."""
    left = len(text) - position
    return any(left < len(marker) and marker.startswith(text[position:]) for marker in markers)


def marker_at(text: str, position: int, markers: Sequence[str]) -> str | None:
    """The marker that starts there."""
    for marker in markers:
        if text.startswith(marker, position):
            return marker
    return None


class MarkerFinder:
    """Cuts a text at markers; what may be the start of one is kept until that is known."""

    def __init__(self, markers: Sequence[str]) -> None:
        """No marker may be the beginning of another one, or cuts would matter."""
        assert not any(a != b and b.startswith(a) for a in markers for b in markers), markers
        self._markers = tuple(markers)
        self._firsts = re.compile("[" + re.escape("".join({m[0] for m in markers})) + "]")
        self._held = ""

    def find(self, text: str) -> tuple[str, str | None, str]:
        """(text before, marker, text behind it); without a marker all is before, or kept."""
        text = self._held + text
        self._held = ""
        for match in self._firsts.finditer(text):
            at = match.start()
            marker = marker_at(text, at, self._markers)
            if marker is not None:
                return text[:at], marker, text[at + len(marker) :]
            if is_cut_marker(text, at, self._markers):
                self._held = text[at:]
                return text[:at], None, ""
        return text, None, ""

    def finish(self) -> str:
        """What was kept: the text has ended, so it is no marker."""
        held, self._held = self._held, ""
        return held
