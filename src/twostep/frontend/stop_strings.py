"""Stop strings: found as early as possible, never shown, and holding back as little as possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec


class StopMatch(msgspec.Struct, frozen=True):
    """A stop string that has just been completed."""

    stop: str
    end: int
    """Characters of the text given to ``feed`` up to the end of the match."""


class StopStringMatcher:
    """Walks a text once, character by character, looking for several strings at a time.

    The state after each character is the longest suffix of the text that begins some stop
    string, so ``held`` is exactly what must not be shown yet. Of several matches the one that
    ends first counts; of those that end together, the first of the list.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops`` are not empty strings."""
        self._next: list[dict[str, int]] = [{}]
        self._depth: list[int] = [0]
        self._found: list[int | None] = [None]
        self._fallback: list[int] = [0]
        self._stops = list(stops)
        self._state = 0
        for order, stop in enumerate(self._stops):
            self._insert(stop, order)
        self._link()

    def _insert(self, stop: str, order: int) -> None:
        node = 0
        for char in stop:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
                self._fallback.append(0)
            node = child
        if self._found[node] is None:
            self._found[node] = order

    def _link(self) -> None:
        """For each prefix, its longest proper suffix that is a prefix too (Aho-Corasick)."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fallback[child] = self._step(self._fallback[node], char)
                queue.append(child)
            found, shorter = self._found[node], self._found[self._fallback[node]]
            if shorter is not None and (found is None or shorter < found):
                self._found[node] = shorter

    def _step(self, state: int, char: str) -> int:
        following = self._next
        while True:
            target = following[state].get(char)
            if target is not None:
                return target
            if not state:
                return 0
            state = self._fallback[state]

    @property
    def held(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str) -> StopMatch | None:
        """Read on; the first match in ``text`` (together with what came before), or None."""
        state, step = self._state, self._step
        for i, char in enumerate(text):
            state = step(state, char)
            found = self._found[state]
            if found is not None:
                self._state = 0
                return StopMatch(self._stops[found], i + 1)
        self._state = state
        return None
