"""Arrivals, datasets and figures of a load test."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from twostep.contracts.errors import UsageError
from twostep.entrypoints.load import datasets
from twostep.entrypoints.load.arrivals import Rate, send_times
from twostep.entrypoints.load.client import Outcome
from twostep.entrypoints.load.results import (
    details,
    max_concurrent,
    num_good_enough,
    parse_goodput,
    percentile,
    summarise,
    table,
)


class Words:
    """A tokenizer of four words; every other text is one token for each letter."""

    vocab_size = 6
    _texts = ("the", " cat", " sat", " on", " A", " mat")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            for token_id, word in enumerate(self._texts):
                if text.startswith(word):
                    ids.append(token_id)
                    text = text[len(word) :]
                    break
            else:
                ids.append(99)
                text = text[1:]
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self._texts[token_id] for token_id in ids)


WORDS: datasets.Tokenizer = Words()  # type: ignore[assignment]


def test_all_at_once_by_default() -> None:
    assert send_times(3, Rate(), 0) == [0.0, 0.0, 0.0]


def test_poisson_has_the_rate_that_was_asked_for() -> None:
    times = send_times(200, Rate(4.0), 1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50.0)
    assert times == send_times(200, Rate(4.0), 1)
    assert times != send_times(200, Rate(4.0), 2)


def test_bursts_have_more_uneven_gaps() -> None:
    def spread(burstiness: float) -> float:
        times = [0.0, *send_times(2000, Rate(10.0, burstiness), 3)]
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        return math.sqrt(sum((gap - 0.1) ** 2 for gap in gaps) / len(gaps)) / 0.1

    assert spread(0.25) > 1.6  # a gamma distribution's is 1 / sqrt(shape)
    assert spread(1.0) == pytest.approx(1.0, abs=0.1)
    assert spread(16.0) < 0.3


@pytest.mark.parametrize("shape", ["linear", "exponential"])
def test_ramp_gets_faster(shape: str) -> None:
    ramp = Rate(math.inf, 1000.0, shape, 1.0, 10.0)  # type: ignore[arg-type]
    times = send_times(100, ramp, 0)
    assert times[1] - times[0] == pytest.approx(1.0, rel=0.2)
    assert times[-1] - times[-2] == pytest.approx(0.1, rel=0.2)


def test_random_prompts_have_exact_lengths() -> None:
    prompts = datasets.random_prompts(
        WORDS, 20, input_len=10, output_len=4, range_ratio=0.5, prefix_len=3, seed=5
    )
    assert {len(WORDS.encode(prompt.text)) for prompt in prompts} > {13}
    assert all(len(WORDS.encode(prompt.text)) == prompt.num_tokens for prompt in prompts)
    assert all(8 <= prompt.num_tokens <= 18 and 2 <= prompt.output_len <= 6 for prompt in prompts)
    assert len({tuple(WORDS.encode(prompt.text)[:3]) for prompt in prompts}) == 1
    with pytest.raises(UsageError, match="range-ratio"):
        datasets.random_prompts(WORDS, 1, input_len=1, output_len=1, range_ratio=1.0)


def test_prefixes_repeat() -> None:
    prompts = datasets.prefix_repetition_prompts(
        WORDS, 12, num_prefixes=3, prefix_len=8, suffix_len=8, output_len=2, seed=1
    )
    heads = [tuple(WORDS.encode(prompt.text)[:8]) for prompt in prompts]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert all(prompt.num_tokens == 16 for prompt in prompts)
    with pytest.raises(UsageError, match="only 2 prompts"):
        datasets.prefix_repetition_prompts(
            WORDS, 2, num_prefixes=3, prefix_len=1, suffix_len=1, output_len=1
        )


def test_sharegpt_file(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    good = [{"value": "the cat sat on"}, {"value": " cat cat sat on cat"}]
    short = [{"value": "the"}, {"value": " cat cat sat on cat"}]
    lone = [{"value": "the cat sat on"}]
    file.write_text(json.dumps([{"conversations": each} for each in (good, short, lone)]))
    prompts = datasets.sharegpt_prompts(WORDS, file, 3)
    assert prompts == [datasets.Prompt("the cat sat on", 4, 5)] * 3
    assert datasets.sharegpt_prompts(WORDS, file, 1, output_len=7)[0].output_len == 7
    file.write_text("[]")
    with pytest.raises(UsageError, match="no usable prompt"):
        datasets.sharegpt_prompts(WORDS, file, 1)
    file.write_text("{}")
    with pytest.raises(UsageError, match="not a list"):
        datasets.sharegpt_prompts(WORDS, file, 1)
    with pytest.raises(UsageError, match="cannot read"):
        datasets.sharegpt_prompts(WORDS, tmp_path / "none", 1)


def test_custom_file(tmp_path: Path) -> None:
    file = tmp_path / "custom.jsonl"
    file.write_text('{"prompt": "the cat"}\n\n{"prompt": "the", "output_tokens": 3}\n')
    prompts = datasets.custom_prompts(WORDS, file, 3, output_len=9)
    assert [(p.num_tokens, p.output_len) for p in prompts] == [(2, 9), (1, 3), (2, 9)]
    file.write_text('{"question": "the cat"}\n')
    with pytest.raises(UsageError, match="line 1"):
        datasets.custom_prompts(WORDS, file, 1, output_len=9)


def outcomes() -> list[Outcome]:
    """Two good ones and a failure."""
    return [
        Outcome(10, 0.0, True, 3, 0.1, [0.2, 0.4], 0.7, 0.0, "a b c"),
        Outcome(20, 0.5, True, 1, 0.3, [], 0.3, 0.0, "d"),
        Outcome(30, 0.6, error="HTTP 503: busy"),
    ]


def test_figures() -> None:
    names = ["ttft", "tpot", "itl", "e2el"]
    result = summarise(
        outcomes(), 2.0, metrics=names, percentiles=[50, 99], goodput={"ttft": 0.2, "tpot": 0.4}
    )
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 4)
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 2.0
    assert result["total_token_throughput"] == 17.0
    assert result["request_goodput"] == 0.5
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["median_tpot_ms"] == pytest.approx(300)
    assert result["mean_itl_ms"] == pytest.approx(300)
    assert result["std_itl_ms"] == pytest.approx(100)
    assert result["p50_e2el_ms"] == pytest.approx(500)
    assert result["max_concurrent_requests"] == 2
    text = table(result | {"max_concurrency": 4, "request_rate": 2.0}, names, [50, 99])
    assert "Successful requests:                     2" in text
    assert "P99 ITL (ms):" in text
    assert "Request goodput (req/s):" in text
    assert details(outcomes())["errors"] == ["", "", "HTTP 503: busy"]


def test_no_success_is_no_crash() -> None:
    result = summarise(
        outcomes()[2:], 1.0, metrics=["ttft", "tpot", "itl"], percentiles=[99], goodput={}
    )
    assert result["completed"] == 0
    assert result["p99_ttft_ms"] == result["mean_itl_ms"] == 0.0
    assert result["request_goodput"] is None


def test_goodput_limits() -> None:
    limits = parse_goodput(["ttft:150", "e2el:1000"])
    assert limits == {"ttft": 0.15, "e2el": 1.0}
    assert num_good_enough(outcomes()[:2], limits) == 1
    for wrong in ("ttft", "ttft:x", "itl:3", "tpot:-1"):
        with pytest.raises(UsageError, match="goodput"):
            parse_goodput([wrong])


def test_percentile_is_linear() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([1.0, 2.0], 100) == 2.0
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 99) == 0.0


def test_concurrency_counts_overlaps() -> None:
    spans = [(0.0, 1.0), (0.5, 1.0), (2.0, 1.0)]
    assert max_concurrent([Outcome(1, start, latency=span) for start, span in spans]) == 2
