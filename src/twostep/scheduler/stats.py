"""What the scheduler counts between two reports."""

from __future__ import annotations

from collections.abc import Sized

from twostep.contracts.outputs import SchedulerStats


class StatsCounter:
    """Events since the last report."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    def count_lookup(self, num_tokens: int, num_hit: int) -> None:
        """A request was looked up in the prefix cache, and that many tokens were found."""
        self._prefix_queries += num_tokens
        self._prefix_hits += num_hit

    def take(self, running: Sized, waiting: Sized, kv_cache_usage: float) -> SchedulerStats:
        """The report; counting starts anew."""
        stats = SchedulerStats(
            num_running_reqs=len(running),
            num_waiting_reqs=len(waiting),
            kv_cache_usage=kv_cache_usage,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            num_preemptions=self.num_preemptions,
        )
        self._prefix_queries = self._prefix_hits = self.num_preemptions = 0
        return stats
