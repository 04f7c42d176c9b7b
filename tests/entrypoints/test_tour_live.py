"""``twostep tour --live``: the same two requests on a real, if tiny, model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import tiny_gguf

from twostep.engine.timeline import Lane, PlanCounts, StepSpan
from twostep.entrypoints.cli import main as cli
from twostep.entrypoints.tour import live
from twostep.entrypoints.tour.live import LaneSpan, scaled_situation, steady_figures
from twostep.entrypoints.tour.live_text import lane_lines

Capture = pytest.CaptureFixture[str]
BUDGET = 64


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Few and short streams: this is no measurement."""
    return str(tiny_gguf(tmp_path, "llama"))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STREAMS", (1, 3))
    monkeypatch.setattr(live, "STEADY_STEPS", 4)


def run_live(model: str, *flags: str) -> int:
    return cli.main(["tour", "--live", model, "--max-num-batched-tokens", str(BUDGET), *flags])


def test_live_document(model: str, capsys: Capture) -> None:
    assert run_live(model, "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["config"]["max_num_batched_tokens"] == BUDGET
    assert document["scheduler_output"]["num_scheduled_tokens"] == {"B": 1, "A": BUDGET - 1}
    assert document["batch"]["query_start_loc"] == [0, 1, BUDGET]
    assert document["num_sampled"] == [1, 0]
    assert document["graph_mode"] == {"step_k": "FULL", "two_decodes": "FULL"}
    assert document["batch"]["logits_indices"] == [0]  # a chunk's row is not computed at all
    [[token], nothing] = document["model_runner_output"]["sampled_token_ids"]
    assert nothing == []
    assert document["outputs"]["0"][0]["new_token_ids"] == [token]
    assert [row["event"] for row in document["counters"]] == [
        "before S k",
        "S k",
        "U k-1",
        "S k+1",
        "U k",
        "S k+2",
        "U k+1",
    ]
    assert document["counters"][3]["A"] == {"num_computed_tokens": 156, "is_prefill_chunk": False}
    assert len(document["stops"]) == 12


def test_live_functions_are_those_of_the_real_device(model: str, capsys: Capture) -> None:
    assert run_live(model, "--json") == 0
    stops = json.loads(capsys.readouterr().out)["stops"]
    assert stops[3]["function"] == "UniprocExecutor.execute_model"
    assert stops[4]["function"] == "GraphDispatcher.dispatch"
    assert stops[9]["also"][0]["function"] == "AsyncOutput.result"
    assert not any("sim/" in stop["file"] for stop in stops)


def test_live_times(model: str, capsys: Capture) -> None:
    """Whatever the times are, the device does the launches of k-1 before those of k."""
    assert run_live(model, "--json") == 0
    times = json.loads(capsys.readouterr().out)["time"]
    lanes = times["lanes_of_call_k_ms"]
    assert [span["what"][:4].strip() for span in lanes if span["lane"] == "host"] == [
        "2-3",
        "4-7",
        "8-9",
        "10",
        "11",
    ]
    device = [span for span in lanes if span["lane"] == "device"]
    assert [span["what"] for span in device] == [
        f"step {step}: {name}" for step in ("k-1", "k") for name in ("forward", "logits", "sample")
    ]
    for before, after in zip(device, device[1:], strict=False):
        assert before["end"] <= after["start"]
    assert 0 <= times["overlap_of_call_k"] <= 1
    assert [row["streams"] for row in times["steady_decode"]] == [1, 3]
    assert all(row["steps"] == 4 for row in times["steady_decode"])


def test_live_text(model: str, capsys: Capture) -> None:
    assert run_live(model) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in ("\n12  ", "S k+2", "call k, in ms", "step k-1: forward", "Steady decoding"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80


def test_streams_that_end_early_are_no_measurement(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(live, "STEADY_STEPS", 300)  # the model's context has 256 tokens
    assert run_live(model) == 1
    assert "only 0 of 1 streams were still running after 308 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--live", "x", "--device", "l4"], "--device is for the simulated tour"),
        (["--live", "x", "--markdown"], "--markdown is for the simulated tour"),
        (["--threads", "2"], "--threads is for --live"),
        (["--device", "cpu"], "twostep tour --live MODEL"),
    ],
)
def test_flags_that_do_not_fit(argv: list[str], text: str, capsys: Capture) -> None:
    assert cli.main(["tour", *argv]) == 2
    assert text in capsys.readouterr().err


def test_scaled_situation() -> None:
    seed = scaled_situation(8192)
    assert (seed.prompt_tokens_b, seed.known_outputs_b, seed.prompt_tokens_a) == (500, 40, 20_000)
    assert scaled_situation(512).prompt_tokens_a == 1250
    assert scaled_situation(512, 2000).prompt_tokens_a == 2000


def span(lane: Lane, start: float, end: float) -> StepSpan:
    counts = PlanCounts(
        step=0, requests=1, tokens=1, new=0, cached=1, blocks=0, finished=0, preempted=0
    )
    return StepSpan(lane=lane, name=lane, start=start, end=end, plan=counts)


def test_steady_figures() -> None:
    """Of 10 ms the device worked for 8; planning took 2 ms, half of it while the device did."""
    figures = steady_figures(
        1,
        2,
        [
            span("device", 0.001, 0.005),
            span("planning", 0.004, 0.006),
            span("wait", 0.006, 0.010),
            span("device", 0.006, 0.010),
            span("planning", 0.0, 0.0),
        ],
    )
    assert figures["ms_per_step"] == 5
    assert figures["device_ms"] == 4
    assert figures["planning_us"] == 1000
    assert figures["overlap"] == 0.5
    assert figures["device_idle"] == pytest.approx(1 / 9, abs=1e-4)


def test_lane_lines() -> None:
    lines = lane_lines([LaneSpan("host", "plan", 0, 1), LaneSpan("device", "work", 1, 10)], 60)
    assert all(len(line) <= 60 for line in lines)
    first, second = (line.split("  ")[-1] for line in lines)
    assert first.count("#") < second.count("#")
