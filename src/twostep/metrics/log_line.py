"""The line of throughput in the log, while there is something to tell."""

from __future__ import annotations

import logging

from twostep.contracts.outputs import SchedulerStats
from twostep.contracts.stats import FinishedRequestStats, IterationStats

logger = logging.getLogger(__name__)


class ThroughputLog:
    """Says what came since the last ``tick``, in vLLM's words, which scripts read.

    An idle engine says once that it has come to rest, and then nothing.
    """

    def __init__(self, now: float) -> None:
        """``now``: seconds of the clock that ``tick`` is called with."""
        self._since = now
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._queries = 0
        self._hits = 0
        self._scheduler: SchedulerStats | None = None
        self._was_idle = True

    def on_step(self, scheduler_stats: SchedulerStats | None, iteration: IterationStats) -> None:
        """See StatsListener."""
        self._prompt_tokens += iteration.num_prompt_tokens - iteration.num_cached_tokens
        self._generation_tokens += iteration.num_generation_tokens
        if scheduler_stats is not None:
            self._scheduler = scheduler_stats
            self._queries += scheduler_stats.prefix_cache_queries
            self._hits += scheduler_stats.prefix_cache_hits

    def on_finished(self, request: FinishedRequestStats) -> None:
        """See StatsListener."""

    def tick(self, now: float) -> None:
        """Log if there is something to tell; called every few seconds."""
        seconds, self._since = now - self._since, now
        stats = self._scheduler
        if stats is None or seconds <= 0:
            return
        is_idle = not (
            self._prompt_tokens
            or self._generation_tokens
            or stats.num_running_reqs
            or stats.num_waiting_reqs
        )
        if not (is_idle and self._was_idle):
            logger.info(
                "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
                "Running: %d reqs, Waiting: %d reqs, CPU KV cache usage: %.1f%%, "
                "Prefix cache hit rate: %.1f%%",
                self._prompt_tokens / seconds,
                self._generation_tokens / seconds,
                stats.num_running_reqs,
                stats.num_waiting_reqs,
                100 * stats.kv_cache_usage,
                100 * self._hits / self._queries if self._queries else 0.0,
            )
        self._was_idle = is_idle
        self._prompt_tokens = self._generation_tokens = 0
