"""The flat batch of one step.

What there is one of for each request is a list: a decode step has few requests, and its weights
drive all else out of the caches, so that a dozen small numpy calls cost more than all that is
done here. What there is one of for each token is made only for who asks.
"""

from __future__ import annotations

from itertools import accumulate
from operator import add

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


class InputBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Decodes first, then prefills by size. B requests, T tokens."""

    req_ids: list[str]
    """[B] in batch order."""
    rows: list[int]
    """[B] permanent row of each request."""
    num_scheduled_tokens: list[int]
    """[B]"""
    num_computed_tokens: list[int]
    """[B] before this step."""
    query_start_loc: list[int]
    """[B + 1] where each request starts in the flat batch."""
    seq_lens: list[int]
    """[B] computed + scheduled."""
    num_sampled: list[int]
    """[B] 1 where a token is drawn, 0 for an unfinished prefill chunk."""

    @property
    def num_tokens(self) -> int:
        """T"""
        return self.query_start_loc[-1]

    @property
    def max_query_len(self) -> int:
        """Most tokens of one request in this step; the batch is in order of them."""
        return self.num_scheduled_tokens[-1]

    @property
    def min_num_computed(self) -> int:
        """Least context that a request had before this step."""
        return min(self.num_computed_tokens)

    @property
    def positions(self) -> Int32Array:
        """[T] position of each token in its sequence."""
        shift = np.array(self.num_computed_tokens) - np.array(self.query_start_loc[:-1])
        offsets = np.repeat(shift.astype(np.int32), self.num_scheduled_tokens)
        positions: Int32Array = np.arange(self.num_tokens, dtype=np.int32)
        positions += offsets
        return positions

    @property
    def logits_indices(self) -> list[int]:
        """[B] flat index of each request's last token."""
        return [end - 1 for end in self.query_start_loc[1:]]

    def slot_mapping(self, block_size: int) -> tuple[Int32Array, Int32Array]:
        """[T] index into the request's block table, and offset in the block, of each token."""
        positions = self.positions
        return positions // block_size, positions % block_size


def continue_decodes(batch: InputBatch, num_computed: list[int]) -> InputBatch:
    """The batch after ``batch``, if that has one token of each request and so has this.

    ``num_computed``: [B] before the new step.
    """
    return InputBatch(
        req_ids=batch.req_ids,
        rows=batch.rows,
        num_scheduled_tokens=batch.num_scheduled_tokens,
        num_computed_tokens=num_computed,
        query_start_loc=batch.query_start_loc,
        seq_lens=[computed + 1 for computed in num_computed],
        num_sampled=batch.num_sampled,
    )


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
    if sum(num_scheduled) > len(num_scheduled):
        order = sorted(range(len(rows)), key=num_scheduled.__getitem__)
        req_ids = [req_ids[i] for i in order]
        rows = [rows[i] for i in order]
        num_scheduled = [num_scheduled[i] for i in order]
        num_computed = [num_computed[i] for i in order]
        prefill_lens = [prefill_lens[i] for i in order]
    seq_lens = list(map(add, num_computed, num_scheduled))
    return InputBatch(
        req_ids=req_ids,
        rows=rows,
        num_scheduled_tokens=num_scheduled,
        num_computed_tokens=num_computed,
        query_start_loc=list(accumulate(num_scheduled, initial=0)),
        seq_lens=seq_lens,
        num_sampled=[
            int(seq_len >= prefill_len)
            for seq_len, prefill_len in zip(seq_lens, prefill_lens, strict=True)
        ],
    )
