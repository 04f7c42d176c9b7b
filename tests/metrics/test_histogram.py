"""Buckets count as prometheus-client's own do."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as TheirHistogram

from twostep.contracts.errors import UsageError
from twostep.metrics.buckets import make_buckets
from twostep.metrics.engine_families import histogram_family
from twostep.metrics.exposition import encode
from twostep.metrics.histogram import Histogram


def test_exposed_as_the_librarys_own_histogram() -> None:
    bounds = (0.1, 1, 2.5)
    rng = random.Random(1)
    values = [0.1, 1.0, 2.5, 2.6, -1.0, *(rng.random() * 4 for _ in range(100))]
    registry = CollectorRegistry()
    theirs = TheirHistogram("h_seconds", "Help.", ["a"], buckets=bounds, registry=registry)
    ours = Histogram("h_seconds", "Help.", bounds)
    for value in values:
        theirs.labels("x").observe(value)
        theirs.labels("x").observe(value)
        ours.observe(value)
    ours.observe_all(values)
    text, content_type = encode([histogram_family(ours, {"a": "x"})], "")
    wanted = [line for line in generate_latest(registry).splitlines() if b"_created" not in line]
    assert text.splitlines() == wanted
    assert content_type.startswith("text/plain")


def test_bounds_of_tokens_end_at_the_longest_sequence() -> None:
    assert make_buckets(100).request_tokens == (1, 2, 5, 10, 20, 50, 100)
    assert make_buckets(40).request_tokens == (1, 2, 5, 10, 20)


def test_overrides() -> None:
    buckets = make_buckets(10, '{"time_to_first_token": [0.5, 1]}')
    assert buckets.time_to_first_token == (0.5, 1)
    assert buckets.request_latency == make_buckets(10).request_latency


@pytest.mark.parametrize(
    "bad",
    [
        "x",
        "[1]",
        '{"ttft": [1]}',
        '{"request_latency": [2, 1]}',
        '{"request_latency": []}',
        '{"request_latency": "12"}',
        '{"request_latency": [true, 2]}',
    ],
)
def test_bad_overrides_are_refused(bad: str) -> None:
    with pytest.raises(UsageError):
        make_buckets(10, bad)
