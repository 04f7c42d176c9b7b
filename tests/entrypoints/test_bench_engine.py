"""``twostep bench latency``, ``throughput`` and ``startup``: keys and arithmetic, never speeds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import tiny_gguf

from twostep.contracts.errors import TwostepError, UsageError
from twostep.contracts.results import CompletionOutput, RequestOutput
from twostep.entrypoints.cli import bench_latency, bench_startup, bench_throughput, main

Capture = pytest.CaptureFixture[str]

FIGURES = {"elapsed_time", "num_requests", "total_num_tokens"}
FIGURES |= {"requests_per_second", "tokens_per_second", "model_id"}


class Vocabulary:
    vocab_size = 50

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


class Engine:
    """Answers with as many tokens as asked, less ``short``; time passes only in ``generate``."""

    def __init__(self, seconds: list[float], short: int = 0) -> None:
        self.now = 100.0
        self.calls: list[tuple[Any, Any]] = []
        self._seconds = itertools.cycle(seconds)
        self._short = short

    def __call__(self, path: str, *, progress: Any, **options: Any) -> Engine:
        self.options = options
        return self

    def clock(self) -> float:
        return self.now

    def get_tokenizer(self) -> Vocabulary:
        return Vocabulary()

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append((prompts, params))
        self.now += next(self._seconds)
        each = params if isinstance(params, list) else [params] * len(prompts)
        return [
            RequestOutput(
                request_id=str(i),
                prompt=None,
                prompt_token_ids=prompt.get("prompt_token_ids", prompt.get("prompt", "").split()),
                outputs=[
                    CompletionOutput(
                        index=k,
                        text="",
                        token_ids=[1] * (p.max_tokens - self._short),
                        finish_reason="length",
                    )
                    for k in range(p.n)
                ],
                finished=True,
            )
            for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))
        ]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


# -- latency --------------------------------------------------------------------------------------


def test_latency_arithmetic(gguf: Path, capsys: Capture) -> None:
    engine = Engine([9.0, 1.0, 2.0, 4.0])  # the first is warm-up
    argv = [str(gguf), "--num-iters", "3", "--num-iters-warmup", "1", "--batch-size", "2"]
    argv += ["--input-len", "5", "--output-len", "7", "--json"]
    assert bench_latency.run(argv, engine, engine.clock) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"model_id", "avg_latency", "latencies", "percentiles"}
    assert found["latencies"] == [1.0, 2.0, 4.0]
    assert found["avg_latency"] == pytest.approx(7 / 3)
    assert found["percentiles"]["50"] == 2.0
    assert found["percentiles"]["75"] == 3.0
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    prompts, params = engine.calls[-1]
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [5, 5]
    assert all(
        id < Vocabulary.vocab_size for prompt in prompts for id in prompt["prompt_token_ids"]
    )
    assert (params.max_tokens, params.ignore_eos) == (7, True)
    assert engine.options["enable_prefix_caching"] is False


def test_latency_for_people(gguf: Path, capsys: Capture) -> None:
    engine = Engine([2.0])
    argv = ["--model", str(gguf), "--num-iters", "2", "--num-iters-warmup", "0"]
    bench_latency.run([*argv, "--batch-size", "3", "--output-len", "10"], engine, engine.clock)
    out = capsys.readouterr().out
    assert "Avg latency: 2.0000 seconds (15.0 output tokens/s)" in out
    assert len(engine.calls) == 2


# -- throughput -----------------------------------------------------------------------------------


def test_throughput_arithmetic(gguf: Path, tmp_path: Path, capsys: Capture) -> None:
    engine = Engine([9.0, 5.0])
    file = tmp_path / "out.json"
    argv = [str(gguf), "--num-prompts", "4", "--num-warmups", "1", "--input-len", "30"]
    argv += ["--output-len", "20", "--n", "2", "--output-json", str(file)]
    assert bench_throughput.run(argv, engine, engine.clock) == 0
    found = json.loads(file.read_text())
    assert set(found) == FIGURES
    assert found["elapsed_time"] == 5.0
    assert found["num_requests"] == 4
    assert found["total_num_tokens"] == 4 * (30 + 2 * 20)
    assert found["requests_per_second"] == pytest.approx(0.8)
    assert found["tokens_per_second"] == pytest.approx(56.0)
    out = capsys.readouterr().out
    assert "Throughput: 0.80 requests/s, 56.00 total tokens/s, 32.00 output tokens/s" in out


def test_throughput_of_a_short_answer_is_refused(gguf: Path) -> None:
    engine = Engine([1.0], short=1)
    with pytest.raises(TwostepError, match="answers of .127. tokens, not 1 of 128"):
        bench_throughput.run([str(gguf), "--num-prompts", "2"], engine, engine.clock)


def test_throughput_of_a_sharegpt_file(gguf: Path, tmp_path: Path, capsys: Capture) -> None:
    turns = [{"value": "one two three four five"}, {"value": "a b c d e f"}]
    file = tmp_path / "share.json"
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    engine = Engine([2.0])
    argv = [str(gguf), "--dataset-name", "sharegpt", "--dataset-path", str(file), "--json"]
    assert bench_throughput.run([*argv, "--num-prompts", "3"], engine, engine.clock) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total_num_tokens"] == 3 * (5 + 6)
    prompts, params = engine.calls[-1]
    assert prompts == [{"prompt": "one two three four five"}] * 3
    assert [each.max_tokens for each in params] == [6, 6, 6]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["x.gguf", "--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["x.gguf", "--dataset-path", "f"], "--dataset-path is for"),
        ([], "say which model"),
        (["x.gguf", "--model", "y.gguf"], "name the model once"),
    ],
)
def test_wrong_usage(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench_throughput.run(argv, Engine([1.0]))


# -- startup --------------------------------------------------------------------------------------


def test_startup_arithmetic(gguf: Path, capsys: Capture) -> None:
    began = iter([0.0, 10.0, 20.0, 30.0])
    took = iter([4.0, 9.0, 1.0, 3.0])
    now = [0.0]

    def clock() -> float:
        now[0] = next(began)
        return now[0]

    def start(path: Path, options: dict[str, Any]) -> dict[str, Any]:
        seconds = next(took)
        return {
            "entered": now[0] + 0.25,
            "first_token": now[0] + seconds,
            "peak_rss_bytes": int(seconds * 1e6),
            "phases": {"import": seconds - 0.25},
        }

    argv = [str(gguf), "--num-iters-cold", "1", "--num-iters-warm", "2", "--json"]
    assert bench_startup.run(argv, start, clock) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cold_startup_times"] == [4.0]
    assert found["warm_startup_times"] == [1.0, 3.0]  # the second start was warm-up
    assert found["avg_warm_startup_time"] == 2.0
    assert found["warm_startup_percentiles"]["50"] == 2.0
    assert found["warm_peak_rss_bytes"] == 3_000_000
    assert found["warm_phases"] == {"interpreter": 0.25, "import": 1.75}


def test_pages_are_counted_and_dropped(tmp_path: Path) -> None:
    """A file just written is in memory; after the drop it is not, unless somebody maps it."""
    file = tmp_path / "weights"
    file.write_bytes(b"x" * (10 * bench_startup.PAGE + 1))
    assert bench_startup.count_pages(file) == (11, 11)
    left = bench_startup.drop_from_page_cache([file])
    assert left == bench_startup.count_pages(file)[0] / 11
    if "tmpfs" not in Path("/proc/mounts").read_text().partition(f" {tmp_path} ")[2][:8]:
        assert left <= 1.0
    assert bench_startup.count_pages(tmp_path / file.name)[1] == 11


# -- on a real (tiny) checkpoint ------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("twostep._native")
    return tiny_gguf(tmp_path_factory.mktemp("model"), "llama", "Q8_0")


@pytest.mark.native
def test_latency_runs(tiny: Path, capsys: Capture) -> None:
    argv = ["bench", "latency", str(tiny), "--num-iters", "2", "--num-iters-warmup", "1"]
    argv += ["--input-len", "4", "--output-len", "3", "--batch-size", "2", "--json"]
    assert main.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["latencies"]) == 2
    assert min(found["latencies"]) > 0


@pytest.mark.native
def test_throughput_runs(tiny: Path, capsys: Capture) -> None:
    argv = ["bench", "throughput", "--model", str(tiny), "--num-prompts", "3", "--json"]
    assert main.main([*argv, "--input-len", "4", "--output-len", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total_num_tokens"] == 3 * 9
    assert set(found) == FIGURES


@pytest.mark.native
def test_startup_runs(tiny: Path, capsys: Capture) -> None:
    argv = ["bench", "startup", str(tiny), "--num-iters-cold", "1", "--num-iters-warm", "1"]
    assert main.main([*argv, "--num-iters-warmup", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [seconds] = found["warm_startup_times"]
    phases = found["warm_phases"]
    assert seconds == pytest.approx(sum(phases.values()))
    assert {"interpreter", "import", "weights", "first token"} <= set(phases)
    assert min(phases.values()) >= 0
    assert found["cold_peak_rss_bytes"] > 20e6
    assert 0 <= found["cold_resident_fraction"] <= 1


@pytest.mark.native
def test_startup_of_a_broken_model_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    argv = ["bench", "startup", str(broken), "--num-iters-cold", "0"]
    assert main.main(argv) == 1
    assert "the engine did not start" in capsys.readouterr().err
