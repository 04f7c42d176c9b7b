"""One permanent row for each running request."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostep.contracts.plan import NewRequestData


class RequestState(msgspec.Struct):
    """What the runner knows of a request. Owned by :class:`RequestStates`."""

    row: int
    prompt_len: int
    prefill_len: int
    """Known tokens at (re-)admission; reaching it, the request samples."""
    num_blocks: int


class RequestStates:
    """Rows and block tables. A row is free again as soon as its request is dropped.

    The host's block table may change while a step is in flight: every launch copies what it needs.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.block_table: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.wanting_logprobs: set[str] = set()
        """Requests that get log-probabilities of sampled or of prompt tokens."""
        self.scoring_prompt: set[str] = set()
        """Those of them that get them of prompt tokens."""
        self._states: dict[str, RequestState] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def of(self, request_ids: list[str]) -> list[RequestState]:
        """The states of several requests, in their order."""
        return list(map(self._states.__getitem__, request_ids))

    def add(self, new: NewRequestData) -> RequestState:
        """Give a new or resumed request a row."""
        params = new.sampling_params
        state = RequestState(
            row=self._free_rows.pop(),
            prompt_len=new.prompt_len,
            prefill_len=len(new.prefill_token_ids),
            num_blocks=0,
        )
        self._states[new.request_id] = state
        if params.prompt_logprobs is not None:
            self.scoring_prompt.add(new.request_id)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self.wanting_logprobs.add(new.request_id)
        self.append_blocks(state, new.block_ids)
        return state

    def append_blocks(self, state: RequestState, block_ids: list[int]) -> None:
        """Extend the request's block table."""
        end = state.num_blocks + len(block_ids)
        self.block_table[state.row, state.num_blocks : end] = block_ids
        state.num_blocks = end

    def drop(self, request_id: str) -> None:
        """Free the row of a finished or preempted request; unknown ids are fine."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._free_rows.append(state.row)
            self.wanting_logprobs.discard(request_id)
            self.scoring_prompt.discard(request_id)
