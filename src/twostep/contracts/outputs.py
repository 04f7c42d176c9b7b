"""What comes back: from the runner to the scheduler, from the core to the front end."""

from __future__ import annotations

import msgspec

from twostep.contracts.kv_events import KVCacheEvent
from twostep.contracts.request import FinishReason


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: the sampled (or prompt) token first, then the top n."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of index 0 in the whole vocabulary, 1 = most likely."""


NO_TOKEN_LEFT = "no token is left that the request allows"
"""Why a request failed whose own constraints exclude each other; the native sampler's words."""


class ModelRunnerOutput(msgspec.Struct, kw_only=True):
    """Result of one step. Rows are looked up by id, never by position in a later batch."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    """One list for each request; empty for an unfinished prefill chunk."""
    logprobs: dict[str, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    """Parallel to the request's sampled tokens; only for requests that asked."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    """The positions of this step's chunk: entry i predicts prompt token computed + i + 1."""
    failed_req_ids: dict[str, str] = msgspec.field(default_factory=dict)
    """Requests whose own numbers are bad (NaN or Inf logits): {id: reason}. The others go on."""
    device_spans: list[tuple[str, float, float]] | None = None
    """When the device worked on this step, in order: ("forward", "logits" or "sample", start, end)
    in seconds of the core's clock. None unless ``Executor.time_device`` was called."""
    graph_mode: str | None = None
    """How the forward pass ran: FULL, PIECEWISE or NONE. Told with ``device_spans``."""
    pooled: dict[str, bytes] = msgspec.field(default_factory=dict)
    """Embeddings: the vector of each request that has ended its prompt, as float32."""
    draft_token_ids: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """What a drafter proposes to follow each request's tokens. Synchronous scheduling only: with
    steps in flight, drafts stay on the device."""


class PrefillStats(msgspec.Struct, frozen=True, kw_only=True):
    """Told once, with a request's first output."""

    num_prompt_tokens: int
    num_cached_tokens: int
    queued_ts: float = 0.0
    """When the core took the request in; seconds, the core's clock."""
    scheduled_ts: float = 0.0
    """When it was planned for the first time."""


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """News of one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    new_prompt_logprobs: list[TokenLogprobs] | None = None
    """All prompt positions but the first, told once with the first output."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id, or the words of an error."""
    ends_with_text: bool = False
    """The last token is part of the text, although the request stopped with it: its grammar was
    complete, so no end token was waited for."""
    prefill_stats: PrefillStats | None = None
    num_preemptions: int = 0
    pooled: bytes | None = None
    """Of an embedding request: its vector, float32, whole and not normalised."""


class SpecDecodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts that came back since the last stats."""

    num_drafts: int = 0
    """Requests times steps."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = msgspec.field(default_factory=list)
    """Entry i: drafts at position i that were accepted."""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler after one update."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    """0..1"""
    prefix_cache_queries: int = 0
    """Tokens looked up since the last stats."""
    prefix_cache_hits: int = 0
    """Tokens of those that were found."""
    num_preemptions: int = 0
    """Since the last stats."""
    spec_decode: SpecDecodeStats | None = None
    """None if no drafts came back."""


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """News for one front end."""

    outputs: list[EngineCoreOutput]
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    """Seconds, the core's clock."""
    kv_events: list[KVCacheEvent] | None = None
    """Changes of the prefix cache, if ``enable_kv_cache_events``; sent to one client."""
