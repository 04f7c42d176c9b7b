"""Upper bounds of the histograms, vLLM's: dashboards and alerts are written for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from twostep.contracts.errors import UsageError

Bounds = tuple[float, ...]


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """One set of bounds for each kind of figure."""

    request_tokens: Bounds
    """Made by ``make_buckets``: 1, 2, 5, 10, ... up to the longest sequence."""
    # fmt: off
    time_to_first_token: Bounds = (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    )
    inter_token_latency: Bounds = (
        0.001, 0.0025, 0.005,  # ours: small models on a CPU are below vLLM's first bound
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0,
    )
    request_latency: Bounds = (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
        240.0, 480.0, 960.0, 1920.0, 7680.0,
    )
    iteration_tokens: Bounds = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    request_params_n: Bounds = (1, 2, 5, 10, 20)
    request_num_preemptions: Bounds = (0, 1, 2, 5, 10, 20, 50, 100)
    # fmt: on


def make_buckets(max_model_len: int, overrides: str | None = None) -> Buckets:
    """The bounds for an engine whose longest sequence has ``max_model_len`` tokens.

    ``overrides``: JSON, ``{"time_to_first_token": [0.01, 0.1, 1]}``. Raises UsageError for unknown
    names and for bounds that do not grow.
    """
    made: dict[str, Bounds] = {"request_tokens": _one_two_five(max_model_len)}
    if overrides:
        made |= _read_overrides(overrides)
    return Buckets(**made)


def _one_two_five(largest: int) -> Bounds:
    bounds: list[float] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > largest:
                return tuple(bounds)
            bounds.append(step * power)
        power *= 10


def _read_overrides(text: str) -> Mapping[str, Bounds]:
    names = list(Buckets.__struct_fields__)
    try:
        given: Any = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UsageError("histogram buckets are given as a JSON object: {NAME: [bounds]}")
    for name, bounds in given.items():
        if name not in names:
            raise UsageError(f"there are no buckets {name!r}; there are {', '.join(names)}")
        if not _grows(bounds):
            raise UsageError(f"the buckets of {name} must be growing numbers")
    return {name: tuple(bounds) for name, bounds in given.items()}


def _grows(bounds: Any) -> bool:
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or not bounds:
        return False
    if not all(isinstance(b, int | float) and not isinstance(b, bool) for b in bounds):
        return False
    return all(a < b for a, b in zip(bounds, bounds[1:], strict=False))
