"""Figures of a sequence that ended, for tests of those who are told them."""

from __future__ import annotations

from twostep.contracts.request import FinishReason
from twostep.contracts.stats import FinishedRequestStats


def finished(**fields: object) -> FinishedRequestStats:
    """Ordinary ones, but for ``fields``."""
    defaults: dict[str, object] = {
        "request_id": "r",
        "index": 0,
        "finish_reason": FinishReason.STOP,
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_generation_tokens": 5,
        "max_tokens": 16,
        "n": 1,
        "num_preemptions": 0,
        "e2e_latency": 3.0,
        "queued_time": 0.5,
        "prefill_time": 0.25,
        "decode_time": 2.0,
        "time_to_first_token": 0.75,
        "is_last": True,
    }
    return FinishedRequestStats(**{**defaults, **fields})  # type: ignore[arg-type]
