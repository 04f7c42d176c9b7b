"""The engine's figures under vLLM's names and labels, for one scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from twostep.metrics.engine_metrics import EngineMetrics
from twostep.metrics.histogram import Histogram


class EngineFamilies:
    """Makes metric families of an EngineMetrics."""

    def __init__(self, metrics: EngineMetrics, *, compat: bool = True) -> None:
        """``compat``: tell old names of vLLM as well."""
        self._metrics = metrics
        self._labels = metrics.labels
        self._compat = compat

    def __iter__(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._infos()
        yield from self._counters()
        for histogram in self._metrics.histograms:
            yield histogram_family(histogram, self._labels)
        if self._compat:
            yield from self._old_names()

    def _gauges(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield self._gauge("num_requests_running", "Being computed.", metrics.num_requests_running)
        yield self._gauge("num_requests_waiting", "Not started.", metrics.num_requests_waiting)
        yield self._gauge(
            "num_requests_waiting_by_reason",
            "Not started, and why; every one counts as capacity.",
            {"capacity": metrics.num_requests_waiting, "deferred": 0},
            "reason",
        )
        yield self._gauge("kv_cache_usage_perc", "Share of blocks in use.", metrics.kv_cache_usage)
        yield self._gauge(
            "engine_sleep_state",
            "Always awake.",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            "sleep_state",
        )

    def _infos(self) -> Iterator[Metric]:
        info = self._metrics.info
        yield _constant(
            "vllm:cache_config_info",
            "The KV cache.",
            {
                "block_size": str(info.block_size),
                "num_gpu_blocks": str(info.num_gpu_blocks),
                "cache_dtype": info.kv_cache_dtype,
                "enable_prefix_caching": str(info.enable_prefix_caching),
                "engine": self._labels["engine"],
            },
        )
        yield _constant(
            "vllm:lora_requests_info",
            "Adapters; there are none.",
            {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""},
            time.time(),
        )
        yield _constant(
            "twostep:engine_info",
            "The engine.",
            {
                **self._labels,
                "version": info.version,
                "architecture": info.architecture,
                "quantization": info.quantization or "",
                "num_threads": str(info.num_threads),
            },
        )

    def _counters(self) -> Iterator[Metric]:
        metrics = self._metrics
        # fmt: off
        yield self._counter("prompt_tokens", "Of started answers.", metrics.prompt_tokens)
        yield self._counter(
            "prompt_tokens_by_source", "Prompt tokens, and where their KV came from.",
            {
                "local_compute": metrics.prompt_tokens - metrics.cached_prompt_tokens,
                "local_cache_hit": metrics.cached_prompt_tokens,
                "external_kv_transfer": 0,
            }, "source")
        yield self._counter(
            "prompt_tokens_cached", "Found in the prefix cache.", metrics.cached_prompt_tokens)
        yield self._counter("generation_tokens", "Generated.", metrics.generation_tokens)
        yield self._counter(
            "prefix_cache_queries", "Tokens looked up.", metrics.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Tokens found.", metrics.prefix_cache_hits)
        for name in ("external_prefix_cache", "mm_cache"):
            yield self._counter(f"{name}_queries", "There is no such cache.", 0)
            yield self._counter(f"{name}_hits", "There is no such cache.", 0)
        yield self._counter("num_preemptions", "Preemptions.", metrics.num_preemptions)
        yield self._filled(
            CounterMetricFamily(
                "twostep:engine_restarts", "The engine core died and was started again.",
                labels=self._label_names(None)),
            metrics.restarts)
        yield self._counter(
            "request_success", "Sequences that ended, and how.",
            {str(reason): count for reason, count in metrics.finished.items()}, "finished_reason")
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Turned away by a full queue.",
            labels=["model_name", "reason"])
        for reason, count in metrics.rejections.items():
            rejections.add_metric([self._labels["model_name"], reason], count)
        yield rejections
        yield self._counter("spec_decode_num_drafts", "Drafts.", metrics.num_drafts)
        yield self._counter(
            "spec_decode_num_draft_tokens", "Tokens of drafts.", metrics.num_draft_tokens)
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Those accepted.", metrics.num_accepted_tokens)
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Those accepted, by place in the draft.",
            {str(i): count for i, count in enumerate(metrics.num_accepted_per_pos)}, "position")
        # fmt: on

    def _old_names(self) -> Iterator[Metric]:
        """Names that vLLM has given up and that routers and dashboards still read."""
        metrics = self._metrics
        queries, hits = metrics.prefix_cache_queries, metrics.prefix_cache_hits
        old = "An old name."
        yield self._gauge("gpu_cache_usage_perc", old, metrics.kv_cache_usage)
        yield self._counter("gpu_prefix_cache_queries", old, queries)
        yield self._counter("gpu_prefix_cache_hits", old, hits)
        yield self._gauge("gpu_prefix_cache_hit_rate", old, hits / queries if queries else 0.0)
        yield self._gauge("num_requests_swapped", old, 0)
        yield histogram_family(
            metrics.inter_token_latency, self._labels, "vllm:time_per_output_token_seconds"
        )

    def _gauge(
        self, name: str, help: str, value: float | dict[str, float], label: str | None = None
    ) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help, labels=self._label_names(label))
        return self._filled(family, value)

    def _counter(
        self, name: str, help: str, value: float | dict[str, float], label: str | None = None
    ) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help, labels=self._label_names(label))
        return self._filled(family, value)

    def _label_names(self, label: str | None) -> list[str]:
        return [*self._labels, label] if label else [*self._labels]

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float | dict[str, float]
    ) -> Metric:
        own = [*self._labels.values()]
        if isinstance(value, dict):
            for key, part in value.items():
                family.add_metric([*own, key], part)
        else:
            family.add_metric(own, value)
        return family


def _constant(name: str, help: str, labels: dict[str, str], value: float = 1.0) -> Metric:
    family = GaugeMetricFamily(name, help, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def histogram_family(
    histogram: Histogram, labels: dict[str, str], name: str | None = None
) -> HistogramMetricFamily:
    """What is exposed of a histogram, under its own name or another one."""
    family = HistogramMetricFamily(name or histogram.name, histogram.help, labels=list(labels))
    buckets = [(str(bound), float(count)) for bound, count in histogram.cumulative()]
    family.add_metric(list(labels.values()), buckets=buckets, sum_value=histogram.sum)
    return family
