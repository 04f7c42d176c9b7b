"""One OpenTelemetry span for each request. The SDK (extra ``[otel]``) is loaded when enabled."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from twostep.contracts.errors import UsageError
from twostep.contracts.outputs import SchedulerStats
from twostep.contracts.request import FinishReason
from twostep.contracts.sampling import SamplingParams
from twostep.contracts.stats import FinishedRequestStats, IterationStats

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

TRACE_HEADERS = ("traceparent", "tracestate")
"""HTTP headers that name the parent span (W3C Trace Context)."""

AttributeValue = str | int | float | list[str]


class _Clock(Protocol):
    def __call__(self) -> int: ...


class _Request(msgspec.Struct):
    """What is known of a request that goes on."""

    params: SamplingParams | None = None
    operation: str = "text_completion"
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    sequences: list[FinishedRequestStats] = msgspec.field(default_factory=list)


class RequestTracer:
    """A StatsListener that sends a span ``llm_request`` when a request ends."""

    def __init__(
        self, exporter: SpanExporter, model_name: str, *, wall_clock_ns: _Clock = time.time_ns
    ) -> None:
        """``exporter`` gets spans in batches, from a thread of its own."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "twostep")})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twostep")
        self._model_name = model_name
        self._wall_clock_ns = wall_clock_ns
        self._requests: dict[str, _Request] = {}

    def begin(
        self,
        request_id: str,
        params: SamplingParams | None,
        operation: str,
        headers: Callable[[bytes], str | None],
    ) -> None:
        """A request was queued; told before its first news.

        ``operation`` is ``chat``, ``text_completion`` or ``embeddings`` (which has no ``params``);
        ``headers`` looks up HTTP headers.
        """
        found = {name: headers(name.encode()) for name in TRACE_HEADERS}
        given = {name: value for name, value in found.items() if value is not None}
        self._requests[request_id] = _Request(params, operation, given)

    def on_step(self, scheduler_stats: SchedulerStats | None, iteration: IterationStats) -> None:
        """See StatsListener."""

    def on_finished(self, request: FinishedRequestStats) -> None:
        """See StatsListener."""
        known = self._requests.setdefault(request.request_id, _Request())
        known.sequences.append(request)
        if request.is_last:
            del self._requests[request.request_id]
            self._send(known)

    def shutdown(self) -> None:
        """Send what is left; waits for it."""
        self._provider.shutdown()

    def _send(self, request: _Request) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = self._wall_clock_ns()
        last = request.sequences[-1]
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(request.headers),
            kind=SpanKind.SERVER,
            start_time=end - int(last.e2e_latency * 1e9),
            attributes=self._attributes(request),
        )
        if any(each.finish_reason is FinishReason.ERROR for each in request.sequences):
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def _attributes(self, request: _Request) -> dict[str, AttributeValue]:
        """vLLM's names, and those of OpenTelemetry's semantic conventions where they differ."""
        sequences = request.sequences
        first = min(sequences, key=lambda each: each.index)
        prompt_tokens = first.num_prompt_tokens
        completion_tokens = sum(each.num_generation_tokens for each in sequences)
        started = [each for each in sequences if each.num_generation_tokens] or [first]
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": request.operation,
            "gen_ai.request.id": first.request_id,
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [str(each.finish_reason) for each in sequences],
            "gen_ai.request.max_tokens": first.max_tokens,
            "gen_ai.request.n": first.n,
            "gen_ai.usage.prompt_tokens": prompt_tokens,
            "gen_ai.usage.completion_tokens": completion_tokens,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": completion_tokens,
            "gen_ai.latency.e2e": sequences[-1].e2e_latency,
            "gen_ai.latency.time_in_queue": min(each.queued_time for each in started),
            "gen_ai.latency.time_to_first_token": min(each.time_to_first_token for each in started),
            "gen_ai.latency.time_in_model_prefill": max(each.prefill_time for each in started),
            "gen_ai.latency.time_in_model_decode": max(each.decode_time for each in started),
            "gen_ai.latency.time_in_model_inference": max(each.inference_time for each in started),
        }
        if request.params is not None:
            attributes["gen_ai.request.temperature"] = request.params.temperature
            attributes["gen_ai.request.top_p"] = request.params.top_p
        return attributes


def make_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to an OTLP ``endpoint`` (http://host:4318/v1/traces).

    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL may be ``http/protobuf`` (default) or ``grpc``. Raises
    UsageError if a package is missing or the protocol unknown.
    """
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    if protocol not in _EXPORTERS:
        raise UsageError(
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}: it may be http/protobuf or grpc"
        )
    module, package = _EXPORTERS[protocol]
    try:
        exporter_class = importlib.import_module(module).OTLPSpanExporter
    except ImportError:
        raise UsageError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({protocol}): pip install '{package}'"
        ) from None
    exporter: SpanExporter = exporter_class(endpoint=endpoint)
    return exporter


_EXPORTERS = {
    "http/protobuf": ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "twostep[otel]"),
    "grpc": (
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
        "opentelemetry-exporter-otlp-proto-grpc",
    ),
}
"""By protocol: the exporter's module, and what to install for it."""
