"""SentencePiece-type BPE (Llama 2, Gemma, Mistral): merges ranked by the score of what they make.

Written here because the ``tokenizers`` library wants an explicit merge list: for Gemma's 262,144
tokens making that list and loading it takes seconds, this encoder is ready in tens of
milliseconds. Same results: the best-scored adjacent pair is merged first, the leftmost of equals.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence

from twostep.frontend.added_tokens import AddedTokenMatcher
from twostep.frontend.token_bytes import SPACE_MARK

_INF = float("inf")
_LONG_PIECE = 160
"""Symbols from which the heap beats scanning a short list."""
_CACHE_ENTRIES = 65536
_CACHED_PIECE_CHARS = 64


class SentencePieceEncoder:
    """Text to ids by scored merges, with byte fallback.

    ``ids`` maps each spelling to its id. ``costs[id]`` is minus the score of a token that merges
    may make, infinity for one they may not; the entry behind the last id must be infinity (it
    stands for "no such token"). ``byte_ids[b]`` is the token of byte b, or None without fallback.
    ``special`` and ``user_defined`` are found in the text before any merging; all spellings have
    space marks for spaces.
    """

    def __init__(
        self,
        ids: dict[str, int],
        costs: list[float],
        byte_ids: Sequence[int] | None,
        unk_token_id: int | None,
        special: dict[str, int],
        user_defined: dict[str, int],
        *,
        add_space_prefix: bool,
    ) -> None:
        self._ids = ids
        self._costs = costs
        self._byte_ids = byte_ids
        self._unk_token_id = unk_token_id
        self._special = AddedTokenMatcher(special)
        self._user_defined = AddedTokenMatcher(user_defined)
        self._add_space_prefix = add_space_prefix
        self._cache: dict[str, list[int]] = {}
        # No merge crosses from a letter to a following space mark unless some token holds that
        # pair, so text falls into words that can be merged and remembered one by one.
        inner_mark = re.compile(f"[^{SPACE_MARK}\0]{SPACE_MARK}")
        crosses = inner_mark.search("\0".join(ids)) is not None
        self._pieces = (
            None if crosses else re.compile(f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+")
        )

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of ``text``, nothing added; special tokens in it are ids only if asked."""
        text = text.replace(" ", SPACE_MARK)
        if not text:
            return []
        out: list[int] = []
        for part in self._special.split(text) if parse_special else [text]:
            if isinstance(part, int):
                out.append(part)
            else:
                self._encode_stretch(part, out)
        return out

    def serve_threads(self) -> None:
        """Nothing to do: no lock, no state."""

    def _encode_stretch(self, text: str, out: list[int]) -> None:
        """Text between special tokens; each stretch gets its own space prefix."""
        for part in self._user_defined.split(SPACE_MARK + text if self._add_space_prefix else text):
            if isinstance(part, int):
                out.append(part)
            else:
                self._encode_plain(part, out)

    def _encode_plain(self, text: str, out: list[int]) -> None:
        cache = self._cache
        for piece in self._pieces.findall(text) if self._pieces is not None else [text]:
            known = cache.get(piece)
            if known is None:
                known = self._encode_piece(piece)
                if len(piece) <= _CACHED_PIECE_CHARS:
                    if len(cache) >= _CACHE_ENTRIES:
                        cache.clear()
                    cache[piece] = known
            out.extend(known)

    def _encode_piece(self, piece: str) -> list[int]:
        symbols = list(piece)
        merged = self._merge_short(symbols) if len(symbols) < _LONG_PIECE else self._merge(symbols)
        out: list[int] = []
        for symbol in merged:
            token_id = self._ids.get(symbol)
            if token_id is not None:
                out.append(token_id)
            elif self._byte_ids is not None:
                out.extend(self._byte_ids[byte] for byte in symbol.encode("utf-8"))
            elif self._unk_token_id is not None:
                out.append(self._unk_token_id)
        return out

    def _merge_short(self, symbols: list[str]) -> list[str]:
        """Merge in place by scanning; every operation runs at C speed on a short list."""
        find, costs = self._ids.get, self._costs
        pair = [costs[find(a + b, -1)] for a, b in zip(symbols, symbols[1:], strict=False)]
        while pair:
            best = min(pair)
            if best == _INF:
                break
            i = pair.index(best)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            del pair[i]
            if i:
                pair[i - 1] = costs[find(symbols[i - 1] + symbols[i], -1)]
            if i < len(pair):
                pair[i] = costs[find(symbols[i] + symbols[i + 1], -1)]
        return symbols

    def _merge(self, symbols: list[str]) -> list[str]:
        """The same merges with a heap over a linked list: n log n for long stretches."""
        find, costs = self._ids.get, self._costs
        size = len(symbols)
        after = list(range(1, size + 1))
        before = list(range(-1, size - 1))
        heap: list[tuple[float, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < size:
                joined = symbols[left] + symbols[right]
                cost = costs[find(joined, -1)]
                if cost != _INF:
                    heapq.heappush(heap, (cost, left, joined))

        for i in range(size - 1):
            offer(i, i + 1)
        while heap:
            _, left, joined = heapq.heappop(heap)
            right = after[left]
            # Stale when either side has changed since the pair was offered.
            if not symbols[left] or right >= size or symbols[left] + symbols[right] != joined:
                continue
            symbols[left], symbols[right] = joined, ""
            after[left] = after[right]
            if after[right] < size:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [symbol for symbol in symbols if symbol]
