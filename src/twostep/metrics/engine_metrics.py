"""Figures of the engine, counted as its events come: from StatsListener and nothing else.

Plain numbers, touched on the event loop only. ``engine_families`` gives them their names when
somebody scrapes; until then nothing of prometheus-client is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostep.contracts.engine_info import EngineInfo
from twostep.contracts.outputs import SchedulerStats, SpecDecodeStats
from twostep.contracts.request import FinishReason
from twostep.contracts.stats import FinishedRequestStats, IterationStats
from twostep.metrics.buckets import Buckets, make_buckets
from twostep.metrics.histogram import Histogram

REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""Limits that turn requests away: values of the label ``reason``."""


class EngineMetrics:
    """All figures of one engine; append it to the engine's listeners."""

    def __init__(
        self,
        model_name: str,
        info: EngineInfo,
        *,
        engine_index: int = 0,
        buckets: Buckets | None = None,
    ) -> None:
        """``model_name`` is the served name."""
        self.labels = {"model_name": model_name, "engine": str(engine_index)}
        """Of every figure."""
        self.info = info
        # Gauges.
        self.num_requests_running = 0
        self.num_requests_waiting = 0
        self.kv_cache_usage = 0.0
        # Counters.
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.rejections = dict.fromkeys(REJECTIONS, 0)
        self.restarts = 0
        """Times that the engine core died and was started again."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_pos: list[int] = []
        self._make_histograms(buckets or make_buckets(info.max_model_len))

    def _make_histograms(self, buckets: Buckets) -> None:
        latency, tokens = buckets.request_latency, buckets.request_tokens
        between = buckets.inter_token_latency
        self.histograms: list[Histogram] = []

        def histogram(name: str, help: str, bounds: Sequence[float]) -> Histogram:
            made = Histogram(f"vllm:{name}", help, bounds)
            self.histograms.append(made)
            return made

        # fmt: off
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", buckets.time_to_first_token)
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between tokens of a sequence.", between)
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean between a request's tokens.", between)
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Arrival to end.", latency)
        self.queue_time = histogram(
            "request_queue_time_seconds", "Waiting for the first plan.", latency)
        self.inference_time = histogram(
            "request_inference_time_seconds", "First plan to last token.", latency)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "First plan to first token.", latency)
        self.decode_time = histogram(
            "request_decode_time_seconds", "First to last token.", latency)
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens of a sequence.", tokens)
        self.request_max_num_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Longest sequence of a request.", tokens)
        self.request_prefill_kv_computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", tokens)
        self.request_params_n = histogram(
            "request_params_n", "Parameter n.", buckets.request_params_n)
        self.request_params_max_tokens = histogram(
            "request_params_max_tokens", "Parameter max_tokens.", tokens)
        self.request_num_preemptions = histogram(
            "request_num_preemptions", "Preemptions of a sequence.",
            buckets.request_num_preemptions)
        self.iteration_tokens = histogram(
            "iteration_tokens_total", "Tokens of a step: prompts that ended and generated.",
            buckets.iteration_tokens)
        # fmt: on
        self._longest: dict[str, int] = {}
        """Most tokens of a sequence, of requests some of whose sequences go on."""

    # ---------------------------------------------------------------- what comes in

    def on_step(self, scheduler_stats: SchedulerStats | None, iteration: IterationStats) -> None:
        """See StatsListener."""
        if scheduler_stats is not None:
            self._take_scheduler(scheduler_stats)
        self.prompt_tokens += iteration.num_prompt_tokens
        self.cached_prompt_tokens += iteration.num_cached_tokens
        self.generation_tokens += iteration.num_generation_tokens
        if tokens := iteration.num_prompt_tokens + iteration.num_generation_tokens:
            self.iteration_tokens.observe(tokens)
        self.time_to_first_token.observe_all(iteration.time_to_first_tokens)
        self.inter_token_latency.observe_all(iteration.inter_token_latencies)

    def _take_scheduler(self, stats: SchedulerStats) -> None:
        self.num_requests_running = stats.num_running_reqs
        self.num_requests_waiting = stats.num_waiting_reqs
        self.kv_cache_usage = stats.kv_cache_usage
        self.prefix_cache_queries += stats.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits
        self.num_preemptions += stats.num_preemptions
        if stats.spec_decode is not None:
            self._take_drafts(stats.spec_decode)

    def _take_drafts(self, drafts: SpecDecodeStats) -> None:
        self.num_drafts += drafts.num_drafts
        self.num_draft_tokens += drafts.num_draft_tokens
        self.num_accepted_tokens += drafts.num_accepted_tokens
        per_pos = self.num_accepted_per_pos
        per_pos += [0] * (len(drafts.num_accepted_tokens_per_pos) - len(per_pos))
        for position, count in enumerate(drafts.num_accepted_tokens_per_pos):
            per_pos[position] += count

    def on_finished(self, request: FinishedRequestStats) -> None:
        """See StatsListener."""
        self.finished[request.finish_reason] += 1
        self.e2e_latency.observe(request.e2e_latency)
        self.request_generation_tokens.observe(request.num_generation_tokens)
        self.request_num_preemptions.observe(request.num_preemptions)
        if request.num_generation_tokens or request.prefill_time:  # it got through its prompt
            self.queue_time.observe(request.queued_time)
            self.inference_time.observe(request.inference_time)
            self.prefill_time.observe(request.prefill_time)
            self.decode_time.observe(request.decode_time)
            self.request_prefill_kv_computed.observe(
                request.num_prompt_tokens - request.num_cached_tokens
            )
        if request.num_generation_tokens > 1:
            self.time_per_output_token.observe(request.time_per_output_token)
        longest = max(self._longest.pop(request.request_id, 0), request.num_generation_tokens)
        if not request.is_last:
            self._longest[request.request_id] = longest
            return
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        self.request_max_num_generation_tokens.observe(longest)
        self.request_params_n.observe(request.n)
        if request.max_tokens:  # not an embedding's
            self.request_params_max_tokens.observe(request.max_tokens)

    def on_restart(self) -> None:
        """A new core took the place of one that died: nothing of the old one runs any more."""
        self.restarts += 1
        self.num_requests_running = self.num_requests_waiting = 0
        self.kv_cache_usage = 0.0
        self._longest.clear()

    def on_rejected(self, reason: str) -> None:
        """A full queue turned a request away; ``reason`` is one of REJECTIONS."""
        self.rejections[reason] += 1
