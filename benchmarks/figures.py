"""From the times at which tokens came to the figures of a cell. One arithmetic for all engines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from benchmarks.cells import Cell, Request

Metrics = dict[str, float]
MAIN_METRIC = {
    "prefill": "tokens_per_second",
    "decode": "tokens_per_second",
    "batch": "output_tokens_per_second",
    "mixed": "total_tokens_per_second",
    "prefix": "total_tokens_per_second",
    "http": "output_tokens_per_second",
    "start": "seconds_to_first_token",
}
"""By kind of cell: what the ratio is taken of."""
LOWER_IS_BETTER = frozenset(
    {"seconds_to_first_token", "peak_rss_mb"}
    | {f"{name}_{percent}" for name in ("ttft", "tpot", "itl") for percent in ("p50", "p99")}
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came of one request. Times in seconds, from the moment the first request was sent."""

    times: list[float]
    """Of each token."""
    token_ids: list[int]
    """Empty where an engine does not tell."""

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Answer:
        """From a worker's JSON."""
        return cls(times=list(document["times"]), token_ids=list(document["token_ids"]))


def figures(cell: Cell, requests: Sequence[Request], answers: Sequence[Answer]) -> Metrics:
    """The metrics of a cell.

    Raises:
        ValueError: An engine gave another number of tokens than was asked for.
    """
    for request, answer in zip(requests, answers, strict=True):
        if len(answer.times) != request.max_tokens:
            raise ValueError(
                f"{len(answer.times)} tokens came where {request.max_tokens} were asked for"
            )
    if cell.kind == "prefill":
        return {"tokens_per_second": len(requests[0].prompt) / answers[0].times[0]}
    if cell.kind == "decode":
        return {"tokens_per_second": decode_speed([answer.times for answer in answers])}
    return load_figures(requests, answers)


def decode_speed(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all sequences decode.

    The clock counts from the moment the last sequence had its first token to the moment the first
    sequence had its last; tokens of that moment came within it.

    Raises:
        ValueError: There is no such time.
    """
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    tokens = sum(begin < moment <= end for each in times for moment in each)
    if end <= begin or tokens == 0:
        raise ValueError("the sequences never decoded all at once: ask for more new tokens")
    return tokens / (end - begin)


def load_figures(requests: Sequence[Request], answers: Sequence[Answer]) -> Metrics:
    """Throughput over the whole run, and latencies (seconds) as each user sees them."""
    wall = max(answer.times[-1] for answer in answers)
    new = sum(len(answer.times) for answer in answers)
    prompts = sum(len(request.prompt) for request in requests)
    ttft = [
        answer.times[0] - request.arrival for request, answer in zip(requests, answers, strict=True)
    ]
    tpot = [
        (answer.times[-1] - answer.times[0]) / (len(answer.times) - 1)
        for answer in answers
        if len(answer.times) > 1
    ]
    metrics = {
        "total_tokens_per_second": (prompts + new) / wall,
        "output_tokens_per_second": new / wall,
        "requests_per_second": len(requests) / wall,
        "ttft_p50": percentile(ttft, 50),
        "ttft_p99": percentile(ttft, 99),
    }
    if tpot:
        metrics |= {"tpot_p50": percentile(tpot, 50), "tpot_p99": percentile(tpot, 99)}
    return metrics


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as NumPy's default."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
