"""A request inside the engine core. Owned by the scheduler; everyone else holds its id."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from twostep.contracts.grammar import Grammar, GrammarFuture
from twostep.contracts.outputs import PrefillStats, TokenLogprobs
from twostep.contracts.request import EngineCoreRequest, FinishReason
from twostep.kv_cache.block_hash import token_array


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
    """Tokens and counters of one sequence."""

    __slots__ = (
        "_prompt_token_ids",
        "all_token_ids",
        "block_hashes",
        "cache_salt",
        "client_index",
        "end_token_ids",
        "eos_token_id",
        "grammar",
        "grammar_future",
        "has_been_scheduled",
        "has_plain_output",
        "is_prefill_chunk",
        "last_step_id",
        "max_total_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "plain_until",
        "prefill_stats",
        "prompt_logprobs",
        "queued_ts",
        "request_id",
        "sampling_params",
        "sort_key",
        "spec_token_ids",
        "status",
        "stop_reason",
        "use_structured_output",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        max_seq_tokens: int,
        queued_ts: float = 0.0,
        grammar_future: GrammarFuture | None = None,
    ) -> None:
        """``max_seq_tokens``: longest sequence the engine can hold; ``max_tokens`` may be less.

        ``queued_ts``: when the core took it in, seconds of its clock.

        ``grammar_future``: the grammar of a structured request.
        """
        params = request.sampling_params
        assert params.max_tokens is not None, "the front end fills max_tokens in"
        self.request_id = request.request_id
        self.client_index = request.client_index
        self.queued_ts = queued_ts
        self.sampling_params = params
        self.eos_token_id = request.eos_token_id
        self.end_token_ids = end_token_ids(request)
        self.cache_salt = request.cache_salt
        self.sort_key = (request.priority, request.arrival_time, request.request_id)
        self.use_structured_output = params.structured_outputs is not None
        assert self.use_structured_output == (grammar_future is not None)
        self.grammar_future = grammar_future
        self.grammar: Grammar | None = None
        """Set when compiled; as far as the known outputs."""
        self.status = (
            RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            if self.use_structured_output
            else RequestStatus.WAITING
        )
        self.stop_reason: int | str | None = None

        self._prompt_token_ids: list[int] | None = request.prompt_token_ids
        """For the first plan; then the array is enough, and a long list is let go."""
        self.all_token_ids = token_array(request.prompt_token_ids)
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
        self.last_step_id = -1
        """The last plan it was part of. If that step was not processed, it is in flight."""
        self.has_been_scheduled = False

        self.plain_until = 0
        """While fewer tokens are computed, the next step is a plain decode: one token, into a
        block it holds, that no limit, grammar or draft has a say in. 0 = never."""
        self.has_plain_output = False
        """Whether news of it are tokens and nothing else, unless it ends."""

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

    def known_token_ids(self) -> list[int]:
        """Prompt and outputs so far, in a list that will not change."""
        prompt, self._prompt_token_ids = self._prompt_token_ids, None
        if prompt is not None and self.num_tokens == self.num_prompt_tokens:
            return prompt
        return self.all_token_ids.tolist()

    def masked_stop_token_ids(self) -> list[int]:
        """Every id that ends the request, eos first: what ``min_tokens`` masks."""
        others = self.end_token_ids - {self.eos_token_id}
        eos = [] if self.eos_token_id is None else [self.eos_token_id]
        return eos + sorted(others)


def end_token_ids(request: EngineCoreRequest) -> frozenset[int]:
    """Tokens that end the request: eos and ``stop_token_ids``."""
    ids = frozenset(request.sampling_params.stop_token_ids or ())
    return ids if request.eos_token_id is None else ids | {request.eos_token_id}
