"""The line of throughput."""

from __future__ import annotations

import logging

import pytest

from twostep.contracts.outputs import SchedulerStats
from twostep.contracts.stats import IterationStats
from twostep.metrics.log_line import ThroughputLog


def test_vllms_words_and_then_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "twostep")
    log = ThroughputLog(100.0)
    log.tick(110.0)
    busy = SchedulerStats(
        num_running_reqs=2,
        num_waiting_reqs=3,
        kv_cache_usage=0.25,
        prefix_cache_queries=80,
        prefix_cache_hits=20,
    )
    step = IterationStats(
        timestamp=0.0, num_prompt_tokens=80, num_cached_tokens=20, num_generation_tokens=100
    )
    log.on_step(busy, step)
    log.on_step(None, IterationStats(timestamp=0.0, num_generation_tokens=1))
    log.tick(120.0)
    log.tick(130.0)
    rest = SchedulerStats(num_running_reqs=0, num_waiting_reqs=0, kv_cache_usage=0.0)
    log.on_step(rest, IterationStats(timestamp=0.0))
    for now in (140.0, 150.0, 160.0):
        log.tick(now)
    assert caplog.messages == [
        "Avg prompt throughput: 6.0 tokens/s, Avg generation throughput: 10.1 tokens/s, "
        "Running: 2 reqs, Waiting: 3 reqs, CPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0%",
        "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, "
        "Running: 2 reqs, Waiting: 3 reqs, CPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0%",
        "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, "
        "Running: 0 reqs, Waiting: 0 reqs, CPU KV cache usage: 0.0%, Prefix cache hit rate: 25.0%",
    ]
