"""A request inside the engine core. Owned by the scheduler; everyone else holds its id."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from twostep.contracts.outputs import PrefillStats, TokenLogprobs
from twostep.contracts.request import EngineCoreRequest, FinishReason


class RequestStatus(enum.IntEnum):
    """Where a request is in its life; everything after PREEMPTED is an end."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REPETITION = 8

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """What clients are told, None before the end."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class Request:
    """Tokens and counters of one sequence.

    What is on its way is told by step ids rather than by counters of its own:

    * ``last_step_id`` later than the last processed step: a step with this request is in flight.
      If it was preempted meanwhile, the tokens are still right, and it waits for them;
    * a row of a plan before ``drop_before_step`` is not this request's any more: thrown away.
    """

    __slots__ = (
        "all_token_ids",
        "block_hashes",
        "cache_salt",
        "client_index",
        "drop_before_step",
        "eos_token_id",
        "has_been_scheduled",
        "is_prefill_chunk",
        "last_step_id",
        "max_total_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "prefill_stats",
        "prompt_logprobs",
        "request_id",
        "sampling_params",
        "sort_key",
        "spec_token_ids",
        "status",
        "stop_reason",
        "stop_token_ids",
        "use_structured_output",
    )

    def __init__(
        self, request: EngineCoreRequest, *, max_seq_tokens: int, next_step_id: int
    ) -> None:
        """``max_seq_tokens``: longest sequence the engine can hold; ``max_tokens`` may be less.

        ``next_step_id``: rows of plans before this one belong to an earlier request of this id.
        """
        params = request.sampling_params
        assert params.max_tokens is not None, "the front end fills max_tokens in"
        self.request_id = request.request_id
        self.client_index = request.client_index
        self.sampling_params = params
        self.eos_token_id = request.eos_token_id
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.cache_salt = request.cache_salt
        self.sort_key = (request.priority, request.arrival_time, request.request_id)
        self.use_structured_output = params.structured_outputs is not None
        self.status = (
            RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            if self.use_structured_output
            else RequestStatus.WAITING
        )
        self.stop_reason: int | str | None = None

        self.all_token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_tokens = self.num_prompt_tokens
        """Known tokens: prompt and outputs."""
        self.max_total_tokens = min(self.num_prompt_tokens + params.max_tokens, max_seq_tokens)
        self.block_hashes: list[bytes] = []

        self.num_computed_tokens = 0
        """Tokens whose KV is computed or planned."""
        self.num_output_placeholders = 0
        """Tokens planned but not returned yet (async scheduling)."""
        self.spec_token_ids: list[int] = []
        self.is_prefill_chunk = False
        self.num_preemptions = 0

        self.has_been_scheduled = False
        self.last_step_id = -1
        self.drop_before_step = next_step_id

        self.prefill_stats: PrefillStats | None = None
        """Set at the first admission, taken by the first output."""
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            None if params.prompt_logprobs is None else []
        )
        """Collected chunk by chunk until the first output takes them."""

    @property
    def num_output_tokens(self) -> int:
        """Outputs known so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Prompt logprobs need every prompt position computed, as long as they are owed."""
        return self.prompt_logprobs is not None

    def collect_prompt_logprobs(self, start: int, chunk: Sequence[TokenLogprobs]) -> None:
        """Entry i of ``chunk`` predicts prompt token ``start + i + 1``.

        Positions that are known already, because a preemption made them come twice, are skipped.
        """
        known = self.prompt_logprobs
        if known is None:
            return
        wanted = self.num_prompt_tokens - 1 - len(known)
        skip = len(known) - start
        assert skip >= 0, "a chunk of prompt logprobs is missing"
        known.extend(chunk[skip : skip + wanted])

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Hand the prompt logprobs over, once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def take_prefill_stats(self) -> PrefillStats | None:
        """Hand the prefill stats over, once."""
        taken, self.prefill_stats = self.prefill_stats, None
        return taken

    def masked_stop_token_ids(self) -> list[int]:
        """Every id that ends the request, eos first: what ``min_tokens`` masks."""
        others = self.stop_token_ids - {self.eos_token_id}
        eos = [] if self.eos_token_id is None else [self.eos_token_id]
        return eos + sorted(others)
