"""/metrics of a live server: names, labels, and figures that agree with the answers (§4.1)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families

from twostep.contracts.outputs import SchedulerStats
from twostep.contracts.stats import IterationStats

LABELS = {"model_name", "engine"}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:iteration_tokens_total",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
    "vllm:request_num_preemptions",
    "vllm:request_prefill_kv_computed_tokens",
}
OTHERS: dict[str, set[str]] = {
    "vllm:num_requests_running": LABELS,
    "vllm:num_requests_waiting": LABELS,
    "vllm:num_requests_waiting_by_reason": LABELS | {"reason"},
    "vllm:kv_cache_usage_perc": LABELS,
    "vllm:engine_sleep_state": LABELS | {"sleep_state"},
    "vllm:cache_config_info": {
        "block_size",
        "num_gpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
        "engine",
    },
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "vllm:prompt_tokens_total": LABELS,
    "vllm:prompt_tokens_by_source_total": LABELS | {"source"},
    "vllm:prompt_tokens_cached_total": LABELS,
    "vllm:generation_tokens_total": LABELS,
    "vllm:prefix_cache_queries_total": LABELS,
    "vllm:prefix_cache_hits_total": LABELS,
    "vllm:external_prefix_cache_queries_total": LABELS,
    "vllm:external_prefix_cache_hits_total": LABELS,
    "vllm:mm_cache_queries_total": LABELS,
    "vllm:mm_cache_hits_total": LABELS,
    "vllm:num_preemptions_total": LABELS,
    "twostep:engine_restarts_total": LABELS,
    "vllm:request_success_total": LABELS | {"finished_reason"},
    "vllm:admission_rejections_total": {"model_name", "reason"},
    "vllm:spec_decode_num_drafts_total": LABELS,
    "vllm:spec_decode_num_draft_tokens_total": LABELS,
    "vllm:spec_decode_num_accepted_tokens_total": LABELS,
}
OLD_NAMES: dict[str, set[str]] = {
    "vllm:gpu_cache_usage_perc": LABELS,
    "vllm:gpu_prefix_cache_queries_total": LABELS,
    "vllm:gpu_prefix_cache_hits_total": LABELS,
    "vllm:num_requests_swapped": LABELS,
    "vllm:time_per_output_token_seconds_count": LABELS,
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(server: LiveServer) -> Samples:
    """All samples by (name, labels), each of which occurs once."""
    answer = server.get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: Samples = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """The one sample of a name that has these labels; 0 if there is none."""
    wanted = labels.items()
    values = [v for (n, own), v in samples.items() if n == name and wanted <= dict(own).items()]
    assert len(values) <= 1, (name, labels)
    return values[0] if values else 0.0


def names_of(samples: Samples) -> dict[str, set[str]]:
    return {name: {label for label, _ in own} for name, own in samples}


def test_every_name_with_its_labels(server: LiveServer) -> None:
    names = names_of(scrape(server))
    expected = {**OTHERS, **OLD_NAMES}
    for name in HISTOGRAMS:
        expected |= {f"{name}_count": LABELS, f"{name}_sum": LABELS}
        expected[f"{name}_bucket"] = LABELS | {"le"}
    for name, labels in expected.items():
        assert names.get(name) == labels, name
    assert {"process_resident_memory_bytes", "python_gc_objects_collected_total"} <= names.keys()


def test_figures_agree_with_the_answers(server: LiveServer) -> None:
    before = scrape(server)
    usages = [
        server.chat("One", max_tokens=5).json["usage"],
        server.complete("Two words", max_tokens=3, ignore_eos=True).json["usage"],
        server.complete("Two", n=3, max_tokens=20).json["usage"],
    ]
    server.post("/v1/chat/completions", {"messages": []})
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("vllm:generation_tokens_total") == sum(u["completion_tokens"] for u in usages)
    # Each sequence computes its prompt; usage counts it once.
    prompts = [u["prompt_tokens"] for u in usages]
    assert grown("vllm:prompt_tokens_total") == prompts[0] + prompts[1] + 3 * prompts[2]
    success = [
        grown("vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error", "repetition")
    ]
    assert sum(success) == 5
    assert success[1] >= 1
    assert grown("vllm:e2e_request_latency_seconds_count") == 5
    assert grown("vllm:time_to_first_token_seconds_count") == 5
    assert grown("vllm:request_params_n_sum") == 5
    by_source = [
        grown("vllm:prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ]
    assert sum(by_source) == grown("vllm:prompt_tokens_total")
    assert grown("http_requests_total", handler="/v1/completions", status="2xx", method="POST") == 2
    refused = {"handler": "/v1/chat/completions", "status": "4xx", "method": "POST"}
    assert grown("http_requests_total", **refused) == 1
    for (name, labels), count in after.items():
        if name.endswith(("_total", "_count", "_bucket")) and not name.startswith("python_gc"):
            assert count >= before.get((name, labels), 0.0), f"{name} went down"


def test_gauges_are_the_schedulers(server: LiveServer) -> None:
    stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5)

    def step() -> None:
        assert server.state.observability.engine is not None
        server.state.observability.engine.on_step(stats, IterationStats(timestamp=0.0))

    server.call(step)
    samples = scrape(server)
    assert value(samples, "vllm:num_requests_running") == 3
    assert value(samples, "vllm:num_requests_waiting") == 2
    assert value(samples, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert value(samples, "vllm:kv_cache_usage_perc", model_name="tiny", engine="0") == 0.5
    assert value(samples, "vllm:gpu_cache_usage_perc") == 0.5
    assert value(samples, "vllm:cache_config_info", num_gpu_blocks="64", block_size="16") == 1


def test_labels_of_http_have_few_values(server: LiveServer) -> None:
    for path in ("/nobody/1", "/nobody/2", "/v1/models/x", "/v1/models/a/b", "/metrics", "/health"):
        server.get(path)
    server.send("BREW", "/v1/models")
    handlers, methods = set(), set()
    for (name, own), _ in scrape(server).items():
        if name == "http_requests_total":
            handlers.add(dict(own)["handler"])
            methods.add(dict(own)["method"])
    assert "none" in handlers
    assert "/v1/models/{model:path}" in handlers
    assert not {h for h in handlers if "nobody" in h or h in ("/metrics", "/health")}
    assert "BREW" not in methods


@pytest.mark.parametrize("stream", [False, True])
def test_sizes_of_http(server: LiveServer, stream: bool) -> None:
    body = json.dumps({"prompt": "a" * 50, "stream": stream}).encode()
    before = scrape(server)
    answer = server.post("/v1/completions", body)
    after = scrape(server)
    for what, size in (("request", len(body)), ("response", len(answer.body))):
        name = f"http_{what}_size_bytes_sum"
        grown = value(after, name, handler="/v1/completions") - value(
            before, name, handler="/v1/completions"
        )
        assert grown == size


def test_open_metrics_for_those_who_ask(server: LiveServer) -> None:
    answer = server.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")


def test_without_compat_and_before_the_engine_is_there() -> None:
    with live_server(load_at_once=False, metrics_compat=False, api_keys=("k",)) as server:
        names = names_of(scrape(server))
        assert not any(name.startswith("vllm:") for name in names)
        assert "process_cpu_seconds_total" in names
        server.finish_loading()
        server.wait_until(lambda: server.state.status == "ready")
        names = names_of(scrape(server))
        assert "vllm:num_requests_running" in names
        assert not OLD_NAMES.keys() & names.keys()


def test_a_full_queue_is_counted() -> None:
    with live_server(max_num_queued_reqs=1) as server:
        server.call(lambda: setattr(server.core, "stall_after", 0))
        stream = server.open_stream("/v1/completions", {"prompt": "a", "stream": True})
        try:
            server.wait_until(lambda: server.state.in_flight.queued_reqs == 1)
            assert server.complete("b").status == 503
            samples = scrape(server)
        finally:
            stream.close()
        name = "vllm:admission_rejections_total"
        assert value(samples, name, reason="max_num_queued_reqs") == 1
        assert value(samples, name, reason="max_num_queued_tokens") == 0


DASHBOARD = Path(__file__).parents[2] / "examples/grafana/twostep.json"
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?=[{\[])")


def _queries(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["expr"]] if isinstance(node.get("expr"), str) else []
        return own + [query for child in node.values() for query in _queries(child)]
    if isinstance(node, list):
        return [query for child in node for query in _queries(child)]
    return []


def test_every_metric_of_the_dashboard_is_exposed(server: LiveServer) -> None:
    server.chat("x", max_tokens=2)
    dashboard = json.loads(DASHBOARD.read_text())
    queries = _queries(dashboard)
    assert len(queries) >= 12
    exposed = names_of(scrape(server))
    used: set[str] = set()
    for query in queries:
        names = _NAME.findall(query)
        assert names, f"no metric in {query}"
        used |= set(names)
        for name in names:
            assert name in exposed, f"{name} in {query}"
        for label in re.findall(r"(\w+)\s*=~?\s*\"", query):
            assert all(label in exposed[name] for name in names), f"{label} in {query}"
        for labels in re.findall(r"\bby \(([^)]*)\)", query):
            for label in labels.split(","):
                assert all(label.strip() in exposed[name] for name in names), f"{label} in {query}"
    [variable] = [v for v in dashboard["templating"]["list"] if v["name"] == "model_name"]
    assert variable["query"]["query"] == "label_values(vllm:num_requests_running, model_name)"
    for part in (
        "time_to_first_token",
        "inter_token_latency",
        "generation_tokens",
        "prompt_tokens",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage",
        "prefix_cache_hits",
        "num_preemptions",
        "queue_time",
        "request_success",
    ):
        assert any(part in name for name in used), part


@pytest.mark.parametrize("bad", ['{"ttft": [1]}', "[]"])
def test_the_command_refuses_bad_buckets(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    from twostep.entrypoints.cli.main import main

    assert main(["serve", "no-such-model", "--custom-histogram-buckets", bad]) == 2
    assert "buckets" in capsys.readouterr().err


def test_each_request_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    monkeypatch.setattr("twostep.metrics.tracing.make_exporter", lambda endpoint: exporter)
    with live_server(otlp_traces_endpoint="http://localhost:1/v1/traces") as server:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        usage = server.post("/v1/chat/completions", body, traceparent=parent).json["usage"]
        server.complete("y", max_tokens=2, n=2, temperature=0.25)
    chat, completion = exporter.get_finished_spans()
    assert chat.attributes is not None
    assert completion.attributes is not None
    assert chat.context is not None
    assert f"{chat.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert chat.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert completion.attributes["gen_ai.operation.name"] == "text_completion"
    assert completion.attributes["gen_ai.request.temperature"] == 0.25
    assert completion.attributes["gen_ai.request.n"] == 2


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("wanted", ["TEXT", "text", "JSON", "protobuf", None])
def test_load_report_on_the_answer(path: str, wanted: str | None) -> None:
    """ORCA: an answer that is no stream carries how loaded the engine is, if asked to."""
    with live_server() as server:
        stats = SchedulerStats(num_running_reqs=1, num_waiting_reqs=3, kv_cache_usage=0.25)
        metrics = server.state.observability.engine
        assert metrics is not None
        metrics.on_step = lambda *_: None
        server.call(lambda: metrics._take_scheduler(stats))
        headers = {} if wanted is None else {"Endpoint-Load-Metrics-Format": wanted}
        body: dict[str, Any] = {"max_tokens": 2, "prompt": "x"}
        url = "/v1/completions"
        if path == "chat":
            body = {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
            url = "/v1/chat/completions"
        report = server.post(url, body, **headers).headers.get("endpoint-load-metrics")
        streamed = server.post(url, {**body, "stream": True}, **headers).headers
    assert "endpoint-load-metrics" not in streamed
    if wanted in ("TEXT", "text"):
        expected = "named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3"
        assert report == f"TEXT {expected}"
    elif wanted == "JSON":
        assert report is not None
        kind, _, document = report.partition(" ")
        figures = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3}
        assert (kind, json.loads(document)) == ("JSON", {"named_metrics": figures})
    else:
        assert report is None
