"""Sends the requests of a load test, each at its time, and collects what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from twostep.contracts.errors import TwostepError
from twostep.entrypoints.load.client import Outcome, Target, send
from twostep.entrypoints.load.datasets import Prompt
from twostep.entrypoints.load.http_stream import ConnectionLostError, HttpPool

READY_POLL_SECONDS = 0.2


async def wait_until_ready(pool: HttpPool, target: Target, prompt: Prompt, timeout: float) -> None:
    """Ask until one request succeeds. Raises TwostepError with the last failure after ``timeout``.

    ``timeout`` in seconds; 0 asks once.
    """
    end = time.monotonic() + timeout
    while True:
        outcome = await send(pool, target, prompt)
        if outcome.success:
            return
        refused = outcome.error.startswith("HTTP 4")
        if refused or time.monotonic() >= end:
            raise TwostepError(f"the server does not answer: {outcome.error}")
        await asyncio.sleep(READY_POLL_SECONDS)


async def first_model(pool: HttpPool, headers: dict[str, str]) -> str:
    """The id of the first model that the server lists."""
    import msgspec

    try:
        async with await pool.request("GET", "/v1/models", headers=headers) as response:
            body = await response.read()
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (OSError, ConnectionLostError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise TwostepError(
            f"cannot ask the server for its model ({type(error).__name__}: {error}): "
            "is it running? Or give --model"
        ) from error


async def run_load(
    pool: HttpPool,
    target: Target,
    prompts: Sequence[Prompt],
    send_times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[int], None] = lambda done: None,
) -> tuple[list[Outcome], float]:
    """Send ``prompts[i]`` at ``send_times[i]`` seconds; returns outcomes in order, and seconds.

    ``on_done`` is told how many have ended.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    num_done = 0
    start = time.perf_counter()

    async def one(prompt: Prompt, due: float) -> Outcome:
        nonlocal num_done
        await asyncio.sleep(start + due - time.perf_counter())
        queued = time.perf_counter()
        async with gate:
            waited = time.perf_counter() - queued
            outcome = await send(pool, target, prompt)
        outcome.queue_time = waited
        num_done += 1
        on_done(num_done)
        return outcome

    tasks = [
        asyncio.create_task(one(prompt, due))
        for prompt, due in zip(prompts, send_times, strict=True)
    ]
    try:
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return list(outcomes), time.perf_counter() - start
