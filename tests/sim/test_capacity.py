"""Traffic through the simulated engine: what is drawn, what is counted."""

from __future__ import annotations

import pytest

from twostep.sim.build import build_sim_core
from twostep.sim.capacity import CapacityFigures, percentile, simulate
from twostep.sim.model_facts import load_model_facts
from twostep.sim.traffic import LengthRange, Traffic

LLAMA = load_model_facts("llama-3.1-8b")


def traffic(num_requests: int = 20, **fields: object) -> Traffic:
    """Prompts of 200-300 tokens, answers of 5-15."""
    if "concurrency" not in fields:
        fields.setdefault("request_rate", 10.0)
    return Traffic(
        num_requests=num_requests,
        input_len=LengthRange(200, 300),
        output_len=LengthRange(5, 15),
        **fields,  # type: ignore[arg-type]
    )


def run(drawn: Traffic, **options: object) -> CapacityFigures:
    """Simulate on an H100 without history."""
    core, executor, clock = build_sim_core(
        LLAMA, "h100", executor_options={"history": 0}, **options
    )
    figures = simulate(core, executor, clock, drawn)
    assert executor.steps == {}
    return figures


def test_traffic_is_a_function_of_the_seed() -> None:
    first, second = (list(traffic(seed=7).requests(1000)) for _ in range(2))
    assert first == second
    assert first != list(traffic(seed=8).requests(1000))
    assert all(200 <= len(r.prompt_token_ids) <= 300 for r in first)
    assert all(5 <= (r.sampling_params.max_tokens or 0) <= 15 for r in first)
    assert all(0 <= token < 1000 for r in first for token in r.prompt_token_ids)


def test_arrivals_follow_the_rate_and_leave_lengths_alone() -> None:
    slow = list(traffic(400, request_rate=10.0).requests(1000))
    fast = list(traffic(400, request_rate=20.0).requests(1000))
    assert slow[-1].arrival_time == pytest.approx(40, rel=0.2)
    assert fast[-1].arrival_time == pytest.approx(slow[-1].arrival_time / 2)
    closed = list(traffic(400, concurrency=3).requests(1000))
    for other in (fast, closed):
        assert [r.prompt_token_ids for r in slow] == [r.prompt_token_ids for r in other]
    moments = [r.arrival_time for r in slow]
    assert moments == sorted(moments)


def test_every_request_is_answered_in_full() -> None:
    drawn = traffic()
    figures = run(drawn)
    for request in drawn.requests(LLAMA.config.vocab_size):
        times = figures.requests[request.request_id]
        assert times.is_finished
        assert times.output_len == request.sampling_params.max_tokens
        assert times.input_len == len(request.prompt_token_ids)
        assert request.arrival_time == times.arrival < times.first_token < times.last_token
    assert figures.duration == max(times.last_token for times in figures.requests.values())
    assert figures.device_busy <= figures.duration
    assert figures.num_steps == sum(figures.graph_modes.values())


def test_a_closed_loop_keeps_its_users_busy() -> None:
    figures = run(traffic(12, concurrency=3))
    assert figures.peak_running <= 3
    arrivals = sorted(times.arrival for times in figures.requests.values())
    ends = sorted(times.last_token for times in figures.requests.values())
    assert arrivals == [0.0, 0.0, 0.0, *ends[:9]]


def test_the_same_seed_gives_the_same_figures() -> None:
    assert run(traffic(seed=3)) == run(traffic(seed=3))


def test_shared_prefixes_are_found_in_the_cache() -> None:
    """160 of every prompt's tokens are ten whole blocks; the first request computes them."""
    drawn = traffic(8, concurrency=1, shared_prefix_len=160)
    cached = [times.num_cached_tokens for times in run(drawn).requests.values()]
    assert cached == [0] + [160] * 7
    without = run(drawn, enable_prefix_caching=False)
    assert {times.num_cached_tokens for times in without.requests.values()} == {0}


def test_a_small_kv_cache_preempts() -> None:
    """Prompts of 10 blocks in a pool of 20: two start, and their answers do not fit."""
    drawn = Traffic(
        num_requests=4, input_len=LengthRange(158, 158), output_len=LengthRange(9, 9), concurrency=4
    )
    figures = run(drawn, max_model_len=200, kv_cache_memory_bytes=21 * (2 << 20))
    assert figures.peak_kv_usage == 1.0
    assert figures.num_preemptions > 0
    assert figures.peak_waiting >= 2
    assert all(times.is_finished for times in figures.requests.values())


def test_times_of_one_request() -> None:
    """Alone on the device: the first step is the first token, each further step one more."""
    figures = run(traffic(1, concurrency=1))
    [times] = figures.requests.values()
    assert times.arrival == 0.0
    assert figures.num_steps == times.output_len
    assert figures.device_busy == pytest.approx(figures.duration) == pytest.approx(times.e2e)
    assert times.tpot == pytest.approx((times.e2e - times.ttft) / (times.output_len - 1))


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, None), ([3], 50, 3), ([3], 99, 3), ([4, 1, 3, 2], 50, 2), (range(1, 101), 99, 99)],
)
def test_percentile(values: list[float], percent: float, expected: float | None) -> None:
    assert percentile(values, percent) == expected
