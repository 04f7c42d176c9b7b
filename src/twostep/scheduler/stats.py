"""What the scheduler counts between two reports."""

from __future__ import annotations

from twostep.contracts.outputs import SchedulerStats, SpecDecodeStats


class StatsCounter:
    """Events since the last report."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._drafts: SpecDecodeStats | None = None

    def count_lookup(self, num_tokens: int, num_hit: int) -> None:
        """A request was looked up in the prefix cache, and that many tokens were found."""
        self._prefix_queries += num_tokens
        self._prefix_hits += num_hit

    def count_drafts(self, num_planned: int, num_accepted: int) -> None:
        """A request's drafts of one step came back."""
        before = self._drafts or SpecDecodeStats()
        per_pos = list(before.num_accepted_tokens_per_pos)
        per_pos += [0] * (num_planned - len(per_pos))
        for position in range(num_accepted):
            per_pos[position] += 1
        self._drafts = SpecDecodeStats(
            num_drafts=before.num_drafts + 1,
            num_draft_tokens=before.num_draft_tokens + num_planned,
            num_accepted_tokens=before.num_accepted_tokens + num_accepted,
            num_accepted_tokens_per_pos=per_pos,
        )

    def take(self, num_running: int, num_waiting: int, kv_cache_usage: float) -> SchedulerStats:
        """The report; counting starts anew."""
        stats = SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            kv_cache_usage=kv_cache_usage,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            num_preemptions=self.num_preemptions,
            spec_decode=self._drafts,
        )
        self._prefix_queries = self._prefix_hits = self.num_preemptions = 0
        self._drafts = None
        return stats
