"""The plan of one step: what the scheduler tells the executor."""

from __future__ import annotations

import msgspec

from twostep.contracts.sampling import SamplingParams


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """A request the runner has no row for: admitted for the first time, or resumed."""

    request_id: str
    prompt_len: int
    """Tokens of the prompt; penalties and min_tokens tell prompt from output by it."""
    prefill_token_ids: list[int]
    """All known tokens: the prompt and, after a preemption, the outputs so far."""
    sampling_params: SamplingParams
    stop_token_ids: list[int]
    """eos and ``stop_token_ids``: what ``min_tokens`` masks."""
    block_ids: list[int]
    """ALL blocks, in order of position; 0 is the null block."""
    num_computed_tokens: int
    """Tokens that are not computed again: the prefix-cache hit, at most all but the last one."""
    num_cached_tokens: int
    """Tokens whose KV is in the blocks already. One more than ``num_computed_tokens`` if all are:
    the last one is computed for its logits only, and its KV, in a block that others share, is
    not written again."""


class CachedRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the runner knows already; parallel lists, changes only."""

    req_ids: list[str]
    new_block_ids: list[list[int] | None]
    """Blocks to append; None when nothing is new."""
    num_computed_tokens: list[int]
    """Values BEFORE this step."""
    num_output_tokens: list[int]
    """Output tokens, placeholders included."""


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one step.

    The runner applies ``finished_req_ids`` and ``preempted_req_ids`` before it adds new requests,
    and ignores ids that it has no row for: after a failed step they are told again.
    """

    step_id: int
    """Counts plans, from 0."""
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """{request id: tokens}; the insertion order is the plan order."""
    total_num_scheduled_tokens: int
    finished_req_ids: frozenset[str]
    """Finished since the last plan; each id is sent exactly once."""
    preempted_req_ids: frozenset[str]
    """Lost their row since the last plan; they come back as new requests."""
    scheduled_spec_decode_tokens: dict[str, list[int]] = msgspec.field(default_factory=dict)
    has_structured_output_requests: bool = False
    """Some logits rows of this plan are masked by grammars."""
    pending_structured_output_tokens: bool = False
    """A grammar of this plan has yet to see a token of the step before: the forward pass may be
    queued at once, sampling only when that step's result was processed."""


class GrammarOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens a grammar allows, for the structured requests of one plan."""

    request_ids: list[str]
    """One entry for each logits row, in plan order: 1 + drafts of a request."""
    bitmask: bytes
    """int32 words, [len(request_ids), ceil(vocab / 32)], bit set = allowed."""
