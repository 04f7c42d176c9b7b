"""Spans of requests, caught in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.finished_stats import finished
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from twostep.contracts.errors import UsageError
from twostep.contracts.request import FinishReason
from twostep.contracts.sampling import SamplingParams
from twostep.metrics.tracing import RequestTracer, make_exporter

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
END_NS = 1_700_000_000_000_000_000


class Traced:
    """A tracer and what it has sent."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = RequestTracer(self.exporter, "served", wall_clock_ns=lambda: END_NS)

    def spans(self) -> tuple[ReadableSpan, ...]:
        self.tracer.shutdown()
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.tracer.shutdown()


def test_a_span_under_the_callers_with_vllms_attributes(traced: Traced) -> None:
    headers = {b"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    params = SamplingParams(temperature=0.5, top_p=0.9)
    traced.tracer.begin("r", params, "chat", headers.get)
    traced.tracer.on_finished(finished())
    [span] = traced.spans()
    assert span.name == "llm_request"
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert (span.start_time, span.end_time) == (END_NS - 3_000_000_000, END_NS)
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.id": "r",
        "gen_ai.request.model": "served",
        "gen_ai.response.model": "served",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.latency.e2e": 3.0,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 0.75,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.25,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_one_span_for_all_sequences_and_one_for_each_request(traced: Traced) -> None:
    traced.tracer.on_finished(finished(n=2, is_last=False))
    traced.tracer.on_finished(finished(request_id="other", finish_reason=FinishReason.ERROR))
    traced.tracer.on_finished(
        finished(n=2, index=1, finish_reason=FinishReason.LENGTH, num_generation_tokens=7)
    )
    other, both = traced.spans()
    assert other.status.status_code is StatusCode.ERROR
    assert other.parent is None
    assert both.attributes is not None
    assert both.attributes["gen_ai.usage.completion_tokens"] == 12
    assert both.attributes["gen_ai.usage.prompt_tokens"] == 10
    assert both.attributes["gen_ai.response.finish_reasons"] == ("stop", "length")


def test_a_parent_that_is_no_trace_context_is_ignored(traced: Traced) -> None:
    headers = {b"traceparent": "garbage\x00", b"tracestate": "=,="}
    traced.tracer.begin("r", SamplingParams(), "chat", headers.get)
    traced.tracer.on_finished(finished())
    [span] = traced.spans()
    assert span.parent is None


def test_what_cannot_be_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(UsageError, match="http/protobuf or grpc"):
        make_exporter("http://localhost:4318/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(UsageError, match=r"pip install 'twostep\[otel\]'"):
        make_exporter("http://localhost:4318/v1/traces")


def test_neither_the_sdk_nor_prometheus_is_loaded_before_it_is_used() -> None:
    code = (
        "import sys, twostep.server.app\n"
        "heavy = ('opentelemetry', 'prometheus_client')\n"
        "loaded = [name for name in sys.modules if name.startswith(heavy)]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
