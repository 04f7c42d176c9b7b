"""What somebody who watches a running engine is sent, several times a second."""

from __future__ import annotations

from typing import Literal

import msgspec


class PlannedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's part of a step."""

    request_id: str
    num_tokens: int
    """Tokens of the budget."""
    num_computed_tokens: int
    """Before the step; of a new request, what the prefix cache had."""
    kind: Literal["new", "prefill", "decode"]
    """First step since it arrived or was preempted, a further chunk of a prompt, one more token."""


class PlanView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One planned step."""

    step_id: int
    time: float
    """When it was planned: seconds, the core's clock."""
    num_tokens: int
    """Of the budget, all requests together."""
    num_requests: int
    planned: list[PlannedRequest]
    """The first ones, in plan order; see ``MAX_PLANNED``."""
    num_new_blocks: int
    preempted: list[str]


class LaneSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the host's thread or the device did, and for which step."""

    step_id: int
    lane: str
    name: str
    start: float
    """Seconds, the core's clock."""
    end: float


class RequestEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A turn in a request's life that is not in a plan."""

    time: float
    request_id: str
    event: str
    """``arrived``, ``aborted``, or why it ended: ``stop``, ``length``, ``error``…"""
    num_tokens: int
    """Of the prompt when it arrived; 0 otherwise."""


BlockState = Literal[0, 1, 2, 3]
"""0 free, 1 free but its content can still be found, 2 held by one request, 3 shared."""


class BlockMap(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The KV cache, block by block."""

    num_blocks: int
    """The null block, number 0, included."""
    cell: int
    """Blocks in one cell: large caches are drawn coarsely, by the first block of each cell."""
    runs: list[tuple[BlockState, int, int]]
    """Run-length coded cells, in order: (state, index in ``owners`` or -1, number of cells)."""
    owners: list[str]
    """Request ids."""


class LiveUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Everything since the last update."""

    time: float
    """Seconds, the core's clock."""
    token_budget: int
    """Of the largest step that there can be."""
    max_num_seqs: int
    plans: list[PlanView]
    spans: list[LaneSpan]
    events: list[RequestEvent]
    running: list[str]
    waiting: list[str]
    """The first ones, in queue order; see ``MAX_WAITING``."""
    num_waiting: int
    kv_cache_usage: float
    """Share of the blocks that somebody holds, 0..1."""
    prefix_cache_queries: int
    """Tokens looked up since the last update."""
    prefix_cache_hits: int
    """Tokens of those that were found."""
    num_preemptions: int
    """Since the last update."""
    num_dropped: int = 0
    """Updates that were thrown away because the reader was behind."""
    blocks: BlockMap | None = None
    """Sent less often than the rest."""
