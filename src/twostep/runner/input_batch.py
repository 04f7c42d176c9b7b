"""The flat batch of one step, as numpy arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InputBatch:
    """Decodes first, then prefills by size. B requests, T tokens."""

    req_ids: list[str]
    """[B] in batch order."""
    rows: Int32Array
    """[B] permanent row of each request."""
    num_scheduled_tokens: Int32Array
    """[B]"""
    num_computed_tokens: Int32Array
    """[B] before this step."""
    query_start_loc: Int32Array
    """[B + 1] where each request starts in the flat batch."""
    seq_lens: Int32Array
    """[B] computed + scheduled."""
    num_sampled: Int32Array
    """[B] 1 where a token is drawn, 0 for an unfinished prefill chunk."""

    @property
    def num_tokens(self) -> int:
        """T"""
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        """Most tokens of one request in this step; the batch is in order of them."""
        return int(self.num_scheduled_tokens[-1])

    @property
    def min_num_computed(self) -> int:
        """Least context that a request had before this step."""
        return int(self.num_computed_tokens.min())

    @property
    def positions(self) -> Int32Array:
        """[T] position of each token in its sequence."""
        shift = self.num_computed_tokens - self.query_start_loc[:-1]
        offsets: Int32Array = np.repeat(shift, self.num_scheduled_tokens)
        positions: Int32Array = np.arange(self.num_tokens, dtype=np.int32)
        positions += offsets
        return positions

    @property
    def logits_indices(self) -> Int32Array:
        """[B] flat index of each request's last token."""
        return self.query_start_loc[1:] - np.int32(1)

    def slot_mapping(self, block_size: int) -> tuple[Int32Array, Int32Array]:
        """[T] index into the request's block table, and offset in the block, of each token."""
        positions = self.positions
        return positions // block_size, positions % block_size


def build_input_batch(
    req_ids: list[str],
    rows: list[int],
    num_scheduled: list[int],
    num_computed: list[int],
    prefill_lens: list[int],
) -> InputBatch:
    """Pack parallel lists in plan order into a batch in batch order.

    The order is by (more than one token, tokens), stable: decodes first, then prefills by size.
    """
    if any(n != 1 for n in num_scheduled):
        order = sorted(range(len(rows)), key=num_scheduled.__getitem__)
        req_ids = [req_ids[i] for i in order]
        rows = [rows[i] for i in order]
        num_scheduled = [num_scheduled[i] for i in order]
        num_computed = [num_computed[i] for i in order]
        prefill_lens = [prefill_lens[i] for i in order]
    scheduled = np.array(num_scheduled, dtype=np.int32)
    computed = np.array(num_computed, dtype=np.int32)
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(scheduled, out=query_start_loc[1:])
    seq_lens = computed + scheduled
    return InputBatch(
        req_ids=req_ids,
        rows=np.array(rows, dtype=np.int32),
        num_scheduled_tokens=scheduled,
        num_computed_tokens=computed,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        num_sampled=(seq_lens >= np.array(prefill_lens, dtype=np.int32)).astype(np.int32),
    )
