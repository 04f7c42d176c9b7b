"""``twostep simulate``: one JSON document, a table of 80 columns, refusals that name the cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.errors import ModelNotFoundError, UsageError
from twostep.entrypoints.cli import simulate
from twostep.entrypoints.cli.main import dispatch
from twostep.sim.known_models import KNOWN_MODELS

SHORT = ["--num-requests", "4", "--input-len", "40-60", "--output-len", "5"]


def simulated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The JSON document of a run."""
    assert dispatch(["simulate", *argv, *SHORT, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "llama-3.1-8b", "--device", "a100-40", "--max-model-len", "4K")
    assert found["model"]["num_params"] == 8_030_261_248
    assert found["engine"]["max_num_batched_tokens"] == 2048
    assert found["engine"]["max_model_len"] == 4096
    assert found["traffic"]["request_rate"] == 4.0
    results = found["results"]
    assert (results["requests"], results["output_tokens"]) == (4, 20)
    assert results["output_tokens_per_s"] == pytest.approx(20 / results["duration_s"])
    assert 0 < results["ttft_s"]["p50"] <= results["ttft_s"]["p99"]
    assert sum(results["device_seconds"].values()) == pytest.approx(
        results["device_busy_share"] * results["duration_s"]
    )
    assert (
        simulated(capsys, "llama-3.1-8b", "--device", "a100-40", "--max-model-len", "4K") == found
    )


def test_eager_decodes_launch_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    graphs = simulated(capsys, "qwen3-8b")["results"]
    eager = simulated(capsys, "qwen3-8b", "--enforce-eager")["results"]
    assert set(graphs["graph_modes"]) == {"FULL", "PIECEWISE"}
    assert set(eager["graph_modes"]) == {"NONE"}
    assert eager["device_seconds"]["launch"] > 2 * graphs["device_seconds"]["launch"]


def test_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["simulate", "llama-3.1-70b", "-tp", "4", *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 90
    assert any(line.startswith("device       4 × H100") for line in lines)


def test_a_config_file_or_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(KNOWN_MODELS["qwen3-8b"]))
    by_name = simulated(capsys, "qwen3-8b")
    for path in (tmp_path / "mine", tmp_path / "mine" / "config.json"):
        found = simulated(capsys, str(path))
        assert found["model"] == {**by_name["model"], "name": "mine"}
        assert found["results"] == by_name["results"]


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured now, so only the shape is known."""
    pytest.importorskip("twostep._native")
    found = simulated(
        capsys, "llama-3.1-8b", "--device", "cpu", "--dtype", "q4_0", "--max-model-len", "256",
        "--kv-cache-memory-bytes", "64MiB", "--gpu-memory-utilization", "1",
    )  # fmt: skip
    assert set(found["device"]["peak_flops"]) == {"int8", "bf16", "fp32"}
    assert all(value > 1e8 for value in found["device"]["peak_flops"].values())
    assert found["device"]["compute_efficiency"] == 1.0
    assert set(found["results"]["graph_modes"]) == {"FULL"}


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        (["nothing"], ModelNotFoundError, "give a config.json"),
        (["qwen3-8b", "--device", "abacus"], UsageError, r"one of h100, .* \(or cpu\)"),
        (["qwen3-8b", "--request-rate", "1", "--concurrency", "2"], UsageError, "exclude each"),
        (["qwen3-8b", "--request-rate", "0"], UsageError, "must be more than 0"),
        (["qwen3-8b", "--input-len", "9-5"], UsageError, "ends before it begins"),
        (["qwen3-8b", "--input-len", "many"], UsageError, "write 512 or 100-2000"),
        (["qwen3-8b", "--input-len", "40K"], UsageError, "up to 41088 tokens, but --max-model"),
        (["qwen3-8b", "--gpu-memory-utilization", "2"], UsageError, "at most 1"),
        (["qwen3-8b", "--max-model-len", "1M"], UsageError, "was trained for 40960"),
        (["qwen3-8b", "--dtype", "q8_0", "--device", "nowhere"], UsageError, "unknown device"),
        (["qwen3-8b", "--dtype", "fp32"], UsageError, "no fp32 arithmetic: choose bf16"),
    ],
)
def test_refusals(argv: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulate.run(argv)


def test_help_lists_devices_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate.run(["--help"])
    out = capsys.readouterr().out
    for name in ("h100", "h200", "a100-40", "a100-80", "l4", "cpu", *KNOWN_MODELS):
        assert name in out
