"""An engine's OpenAI server under load; the client is that of ``twostep bench serve``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from benchmarks.cells import Cell, Request
from benchmarks.figures import Metrics, percentile
from benchmarks.peers.base import SAMPLING
from benchmarks.peers.llama_server import STARTED_WITHIN, free_port
from benchmarks.process import Program, ProgramError

WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had
an they which one you were all her she there would their we him been has when who will no more if
out so up said what its about than into them can only other time new some could these
"""
"""One token each, with the space before it."""


class HttpServer:
    """Started when first asked, paused between turns."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str] | None = None,
        *,
        seeded: bool = True,
    ) -> None:
        """``command(port)`` serves on that port of 127.0.0.1; ``seeded``: requests have a seed."""
        self._command = command
        self._environment = dict(environment or {})
        self._seeded = seeded
        self._port = 0
        self._program: Program | None = None

    def measure(self, cell: Cell, requests: Sequence[Request]) -> Metrics:
        """``cell.batch`` streams, each asking for the next answer as soon as one has ended."""
        import uvloop

        from twostep.contracts.errors import TwostepError

        fresh = self._program is None
        if self._program is None:
            self._port = free_port()
            self._program = Program(self._command(self._port), self._environment)
        self._program.resume()
        self._program.check_alive()
        try:
            return uvloop.run(self._measure(cell, requests, fresh=fresh))
        except TwostepError as error:
            self._program.check_alive()
            raise ProgramError(str(error)) from None

    def rest(self) -> None:
        """Cost nothing until asked again."""
        if self._program is not None:
            self._program.pause()

    def close(self) -> None:
        """End it."""
        if self._program is not None:
            self._program.kill()
            self._program = None

    async def _measure(self, cell: Cell, requests: Sequence[Request], *, fresh: bool) -> Metrics:
        # A worker in a peer's environment, which has no twostep, imports this module, too.
        from twostep.entrypoints.load.client import Target
        from twostep.entrypoints.load.datasets import Prompt
        from twostep.entrypoints.load.http_stream import HttpPool
        from twostep.entrypoints.load.run import first_model, run_load, wait_until_ready

        pool = HttpPool(f"http://127.0.0.1:{self._port}")
        try:
            if fresh:
                await self._wait(lambda: first_model(pool, {}))
            body: dict[str, Any] = {**SAMPLING, "ignore_eos": True}
            if self._seeded:
                body["seed"] = requests[0].seed
            target = Target(
                backend="openai", endpoint="/v1/completions", headers={}, body=body,
                model=await first_model(pool, {}),
            )  # fmt: skip
            if fresh:
                await wait_until_ready(pool, target, Prompt("the", 1, 4), STARTED_WITHIN)
            prompts = [
                Prompt(text_of(request.prompt), len(request.prompt), request.max_tokens)
                for request in requests
            ]
            outcomes, seconds = await run_load(
                pool, target, prompts, [0.0] * len(prompts), max_concurrency=cell.batch
            )
        finally:
            pool.close()
        for request, outcome in zip(requests, outcomes, strict=True):
            if not outcome.success:
                raise ProgramError(outcome.error)
            if outcome.output_len != request.max_tokens:
                raise ProgramError(f"{outcome.output_len} tokens came of {request.max_tokens}")
        ttft = [outcome.ttft for outcome in outcomes]
        gaps = [gap for outcome in outcomes for gap in outcome.itl]
        return {
            "output_tokens_per_second": sum(o.output_len for o in outcomes) / seconds,
            "ttft_p50": percentile(ttft, 50),
            "ttft_p99": percentile(ttft, 99),
            "itl_p50": percentile(gaps, 50),
            "itl_p99": percentile(gaps, 99),
        }

    async def _wait(self, ask: Callable[[], Awaitable[str]]) -> None:
        """Until it lists its model."""
        from twostep.contracts.errors import TwostepError

        assert self._program is not None
        deadline = time.monotonic() + STARTED_WITHIN
        while True:
            self._program.check_alive()
            try:
                await ask()
            except TwostepError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
            else:
                return


def text_of(token_ids: Sequence[int]) -> str:
    """Another text for other ids, of as many words."""
    words = WORDS.split()
    return " ".join(words[token_id % len(words)] for token_id in token_ids)
