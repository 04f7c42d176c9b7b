"""The figures of a load test, under vLLM's names."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from twostep.contracts.errors import UsageError
from twostep.entrypoints.load.client import Outcome

METRICS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
}
"""{key: what people read}"""
HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


class Samples(msgspec.Struct, frozen=True):
    """Seconds, by metric; of the requests that succeeded."""

    by_metric: Mapping[str, list[float]]


def samples_of(outcomes: Sequence[Outcome]) -> Samples:
    """Times of all requests. TPOT is the mean gap of one request, ITL every gap."""
    good = [outcome for outcome in outcomes if outcome.success]
    return Samples(
        {
            "ttft": [outcome.ttft for outcome in good],
            "tpot": [tpot(outcome) for outcome in good if outcome.output_len > 1],
            "itl": [gap for outcome in good for gap in outcome.itl],
            "e2el": [outcome.latency for outcome in good],
        }
    )


def tpot(outcome: Outcome) -> float:
    """Seconds per token after the first one."""
    return (outcome.latency - outcome.ttft) / max(outcome.output_len - 1, 1)


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """``["ttft:200", "tpot:50"]`` to seconds by metric."""
    limits = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if not colon or name not in ("ttft", "tpot", "e2el") or milliseconds < 0:
            raise UsageError(f"--goodput {pair!r}: write ttft:MS, tpot:MS or e2el:MS")
        limits[name] = milliseconds / 1000
    return limits


def summarise(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """The figures; ``duration`` and ``goodput`` in seconds, latencies come out in milliseconds."""
    good = [outcome for outcome in outcomes if outcome.success]
    total_input = sum(outcome.prompt_len for outcome in good)
    total_output = sum(outcome.output_len for outcome in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": num_good_enough(good, goodput) / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_concurrent_requests": max_concurrent(outcomes),
    }
    samples = samples_of(outcomes)
    for name in metrics:
        milliseconds = [1000 * value for value in samples.by_metric[name]]
        result |= {
            f"mean_{name}_ms": statistics.fmean(milliseconds) if milliseconds else 0.0,
            f"median_{name}_ms": statistics.median(milliseconds) if milliseconds else 0.0,
            f"std_{name}_ms": statistics.pstdev(milliseconds) if milliseconds else 0.0,
        }
        for percent in percentiles:
            result[f"p{percent:g}_{name}_ms"] = percentile(milliseconds, percent)
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """One entry for each request, in the order in which they were sent."""
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itl for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.start_time for outcome in outcomes],
        "queue_times": [outcome.queue_time for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def num_good_enough(good: Sequence[Outcome], limits: Mapping[str, float]) -> int:
    """Requests that kept every limit (seconds)."""
    return sum(
        all(
            {"ttft": outcome.ttft, "tpot": tpot(outcome), "e2el": outcome.latency}[name] <= limit
            for name, limit in limits.items()
        )
        for outcome in good
    )


def max_concurrent(outcomes: Sequence[Outcome]) -> int:
    """Most requests that were under way at one time."""
    changes = [(outcome.start_time, 1) for outcome in outcomes]
    changes += [(outcome.start_time + outcome.latency, -1) for outcome in outcomes]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def table(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """For people, and for scripts that read vLLM's table."""
    rows: list[tuple[str, str]] = [
        ("Successful requests:", str(result["completed"])),
        ("Failed requests:", str(result["failed"])),
    ]
    if result.get("max_concurrency"):
        rows.append(("Maximum request concurrency:", str(result["max_concurrency"])))
    if result.get("request_rate") not in (None, "inf"):
        rows.append(("Request rate configured (RPS):", f"{result['request_rate']:.2f}"))
    rows += [
        ("Benchmark duration (s):", f"{result['duration']:.2f}"),
        ("Total input tokens:", str(result["total_input_tokens"])),
        ("Total generated tokens:", str(result["total_output_tokens"])),
        ("Request throughput (req/s):", f"{result['request_throughput']:.2f}"),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", f"{result['request_goodput']:.2f}"))
    rows += [
        ("Output token throughput (tok/s):", f"{result['output_throughput']:.2f}"),
        ("Peak concurrent requests:", f"{result['max_concurrent_requests']:.2f}"),
        ("Total token throughput (tok/s):", f"{result['total_token_throughput']:.2f}"),
    ]
    lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=50, c="=")]
    lines += [f"{label:<40} {value:<10}" for label, value in rows]
    for name in metrics:
        short = METRICS[name]
        lines.append("{s:{c}^{n}}".format(s=HEADINGS[name], n=50, c="-"))
        kinds = [("Mean", "mean"), ("Median", "median")]
        kinds += [(f"P{percent:g}", f"p{percent:g}") for percent in percentiles]
        lines += [
            f"{f'{label} {short} (ms):':<40} {result[f'{key}_{name}_ms']:<10.2f}"
            for label, key in kinds
        ]
    lines.append("=" * 50)
    return "\n".join(lines)
