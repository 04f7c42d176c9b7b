"""What a scrape gets: the engine, HTTP, and this process. Loaded by the first scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from twostep.metrics.engine_families import EngineFamilies, histogram_family
from twostep.metrics.engine_metrics import EngineMetrics
from twostep.metrics.http_metrics import HttpMetrics


class Exposition(Collector):
    """One registry of this process."""

    def __init__(self, http: HttpMetrics, *, compat: bool = True) -> None:
        """``compat``: tell old names of vLLM as well."""
        self._http = http
        self._compat = compat
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self.engine: EngineMetrics | None = None
        """Once there is one."""

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        if self.engine is not None:
            yield from EngineFamilies(self.engine, compat=self._compat)
        yield from _http_families(self._http)

    def snapshot(self) -> list[Metric]:
        """All families as they are now; on the event loop, where they are counted."""
        return list(self._registry.collect())


def encode(families: Sequence[Metric], accept: str) -> tuple[bytes, str]:
    """(body, content type) of a snapshot: Prometheus text, or OpenMetrics if ``accept`` asks."""
    encoder, content_type = choose_encoder(accept)
    return encoder(_Taken(families)), content_type


class _Taken(CollectorRegistry):
    """A registry that holds a snapshot."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return iter(self._families)


def _http_families(http: HttpMetrics) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "http_requests", "Requests.", labels=["method", "status", "handler"]
    )
    for labels, count in http.requests.items():
        requests.add_metric(labels, count)
    yield requests
    durations = HistogramMetricFamily(
        "http_request_duration_seconds", "Time of a request.", labels=["method", "handler"]
    )
    for (method, handler), histogram in http.durations.items():
        one = histogram_family(histogram, {"method": method, "handler": handler})
        durations.samples += one.samples
    yield durations
    yield histogram_family(http.fine_duration, {})
    for what, sizes in (("request", http.request_bytes), ("response", http.response_bytes)):
        family = SummaryMetricFamily(
            f"http_{what}_size_bytes", f"Bytes of {what} bodies.", labels=["handler"]
        )
        for handler, (count, total) in sizes.items():
            family.add_metric([handler], count_value=count, sum_value=total)
        yield family
