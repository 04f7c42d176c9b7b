"""Runs requests on an engine that is stepped by its caller, and notes when each token comes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benchmarks.cells import Request


class Stepped(Protocol):
    """An engine with vLLM's loop."""

    def add(self, request: Request, *, greedy: bool) -> str:
        """Queue a request; returns its id."""
        ...

    def step(self) -> list[tuple[str, list[int]]]:
        """One step: (id, new token ids) of each request that has any."""
        ...

    def busy(self) -> bool:
        """Whether requests are unfinished."""
        ...


def run(
    engine: Stepped,
    requests: Sequence[Request],
    *,
    cached: bool,
    greedy: bool,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[dict[str, Any]]:
    """Serve all requests, each from its arrival on.

    Args:
        engine: Idle.
        requests: In order of arrival.
        cached: Compute the prompts first, unseen by the clock, so that the engine's prefix cache
            holds them when the requests come.
        greedy: Take the likeliest token instead of sampling.
        clock: Seconds.
        sleep: Waits that long.

    Returns:
        One ``{"times", "token_ids"}`` for each request, times from the start of the run.
    """
    if cached:
        for request in requests:
            engine.add(dataclasses.replace(request, max_tokens=1), greedy=greedy)
        while engine.busy():
            engine.step()
    answers: list[dict[str, Any]] = [{"times": [], "token_ids": []} for _ in requests]
    by_id: dict[str, dict[str, Any]] = {}
    coming = list(zip(requests, answers, strict=True))[::-1]
    started = clock()
    while coming or engine.busy():
        while coming and coming[-1][0].arrival <= clock() - started:
            request, answer = coming.pop()
            by_id[engine.add(request, greedy=greedy)] = answer
        if not engine.busy():
            sleep(max(0.0, coming[-1][0].arrival - (clock() - started)))
            continue
        news = engine.step()
        now = clock() - started
        for request_id, token_ids in news:
            by_id[request_id]["times"] += [now] * len(token_ids)
            by_id[request_id]["token_ids"] += token_ids
    return answers
