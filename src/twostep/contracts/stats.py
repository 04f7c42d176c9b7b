"""What metrics and the live view learn: after every step, and when a sequence ends.

All times are seconds of one monotonic clock (the system's), which core and front end share.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from twostep.contracts.outputs import SchedulerStats
from twostep.contracts.request import FinishReason


class IterationStats(msgspec.Struct, kw_only=True):
    """One message of the core, as the front end processed it."""

    timestamp: float
    """When the front end processed it."""
    core_timestamp: float = 0.0
    """When the core made it."""
    num_prompt_tokens: int = 0
    """Of requests whose first token came now."""
    num_cached_tokens: int = 0
    """Those of them that the prefix cache had."""
    num_generation_tokens: int = 0
    time_to_first_tokens: list[float] = []
    """Seconds since arrival, one entry for each sequence that got its first token."""
    inter_token_latencies: list[float] = []
    """Seconds since the sequence's last news, one entry for each that got further tokens."""


class FinishedRequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that ended (``n > 1`` brings n of these)."""

    request_id: str
    """As the user named it."""
    index: int
    """Of the sequence in its request."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    max_tokens: int
    """0 for an embedding request: its vector counts as its first token's time, and as no token."""
    n: int
    num_preemptions: int
    e2e_latency: float
    """Arrival to end."""
    queued_time: float
    """Arrival in the core to the first plan; 0 if it was never planned."""
    prefill_time: float
    """First plan to first token; 0 without a token."""
    decode_time: float
    """First to last token."""
    time_to_first_token: float
    """Arrival to first token; 0 without a token."""
    is_last: bool
    """Whether the whole request has ended with this sequence."""

    @property
    def inference_time(self) -> float:
        """First plan to last token."""
        return self.prefill_time + self.decode_time

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between tokens; 0 for fewer than two."""
        steps = self.num_generation_tokens - 1
        return self.decode_time / steps if steps > 0 else 0.0


class StatsListener(Protocol):
    """Called on the event loop, in order; must be quick and must not raise."""

    def on_step(self, scheduler_stats: SchedulerStats | None, iteration: IterationStats) -> None:
        """A message of the core was processed; the stats are the scheduler's after that step."""
        ...

    def on_finished(self, request: FinishedRequestStats) -> None:
        """A sequence ended, was aborted, or failed."""
        ...
