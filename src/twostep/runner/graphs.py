"""Which recorded graph a batch replays. Pure arithmetic, shared by every kind of device.

A GPU captures graphs for a list of sizes, and a batch is padded to the next one. The CPU replays
its recorded plan with any number of tokens: no list, no padding. A dispatcher knows the one or the
other, and gives the same answer on a real device and on a simulated one.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

MAX_CAPTURE_SIZE = 512
"""Tokens of the largest graph, unless a device asks for more."""


class GraphMode(enum.Enum):
    """What is replayed as one piece. A batch runs in one of the first three."""

    NONE = "NONE"
    """Op by op."""
    PIECEWISE = "PIECEWISE"
    """Graphs between the attention layers; attention itself is launched on its own."""
    FULL = "FULL"
    """The whole model; as a setting: for every batch."""
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    """FULL for uniform decodes, NONE for the rest."""
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"
    """FULL for uniform decodes, PIECEWISE for the rest."""

    # Members are looked up in every step, and Enum's own hash is a Python function.
    __hash__ = object.__hash__

    @property
    def decode_mode(self) -> GraphMode:
        """What uniform decodes run in, if a graph fits."""
        if self in (GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE):
            return GraphMode.FULL
        return self

    @property
    def mixed_mode(self) -> GraphMode:
        """What every other batch runs in, if a graph fits."""
        if self is GraphMode.FULL_DECODE_ONLY:
            return GraphMode.NONE
        if self is GraphMode.FULL_AND_PIECEWISE:
            return GraphMode.PIECEWISE
        return self


class BatchDescriptor(msgspec.Struct, frozen=True):
    """How a batch runs. Padding included: rows without tokens, tokens without a slot."""

    mode: GraphMode
    """NONE, PIECEWISE or FULL."""
    num_tokens: int
    num_reqs: int


def choose_capture_sizes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_spec_tokens: int = 0,
    max_capture_size: int = MAX_CAPTURE_SIZE,
) -> tuple[int, ...]:
    """Token counts to capture graphs for, ascending.

    1, 2, 4, then every 8 up to 248, then every 16: fine where a decode batch is small and padding
    would show, coarse above. With drafts each request of a decode has ``1 + num_spec_tokens``
    tokens, so the same numbers of requests are captured as well.
    """
    query_len = 1 + num_spec_tokens
    largest = min(2 * max_num_seqs * query_len, max_capture_size, max_num_batched_tokens)
    base = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    sizes = {*base, *(size * query_len for size in base), max_num_seqs * query_len}
    return tuple(sorted(size for size in sizes if size <= largest))


class GraphDispatcher:
    """Picks the mode of each batch."""

    def __init__(
        self,
        mode: GraphMode,
        *,
        capture_sizes: Sequence[int] | None,
        max_num_seqs: int,
        decode_query_len: int = 1,
        enforce_eager: bool = False,
    ) -> None:
        """``mode``: what the device captured; ``enforce_eager`` overrides it.

        ``capture_sizes``: token counts of the graphs; None if any batch can be replayed as it is.
        ``decode_query_len``: tokens of a decoding request, 1 + drafts.
        """
        self.mode = GraphMode.NONE if enforce_eager else mode
        self.decode_query_len = decode_query_len
        self._decode_mode, self._mixed_mode = self.mode.decode_mode, self.mode.mixed_mode
        self._max_num_seqs = max_num_seqs
        self._sizes = None if capture_sizes is None else sorted(capture_sizes)
        self._decode_sizes = [
            size
            for size in self._sizes or ()
            if size % decode_query_len == 0 and size <= max_num_seqs * decode_query_len
        ]

    @property
    def largest_size(self) -> int | None:
        """Tokens of the largest graph; None if any batch can be replayed as it is."""
        return max(self._sizes, default=0) if self._sizes is not None else None

    def dispatch(
        self, num_tokens: int, num_reqs: int, *, max_query_len: int, min_num_computed: int
    ) -> BatchDescriptor:
        """How a batch of ``num_reqs`` requests and ``num_tokens`` tokens runs.

        ``max_query_len``: most tokens of one request; ``min_num_computed``: least context that a
        request had before this step. It is a uniform decode if every request has exactly the
        decode length and some context: the last token of a prompt counts, a whole prompt of one
        token does not.
        """
        is_decode = (
            max_query_len == self.decode_query_len
            and num_tokens == num_reqs * max_query_len
            and min_num_computed > 0
        )
        if self._sizes is None:
            mode = self._decode_mode if is_decode else self._mixed_mode
            return BatchDescriptor(mode, num_tokens, num_reqs)
        if is_decode and self._decode_mode is GraphMode.FULL:
            size = _next_size(self._decode_sizes, num_tokens)
            if size is not None:
                return BatchDescriptor(GraphMode.FULL, size, size // self.decode_query_len)
        size = _next_size(self._sizes, num_tokens)
        if size is None or self._mixed_mode is GraphMode.NONE:
            return BatchDescriptor(GraphMode.NONE, num_tokens, num_reqs)
        if self._mixed_mode is GraphMode.FULL:
            return BatchDescriptor(GraphMode.FULL, size, min(size, self._max_num_seqs))
        return BatchDescriptor(GraphMode.PIECEWISE, size, num_reqs)


def _next_size(sizes: list[int], num_tokens: int) -> int | None:
    """The smallest size that holds so many tokens."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else None
