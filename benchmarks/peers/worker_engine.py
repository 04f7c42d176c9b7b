"""An engine that runs as a ``benchmarks.worker``: the parent's side."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cells import Cell, Request
from benchmarks.figures import Answer, Metrics, figures
from benchmarks.models import Model
from benchmarks.peers.base import Limits
from benchmarks.peers.http_server import HttpServer
from benchmarks.process import Program, ProgramError

SETTLE_SECONDS = 1.0
"""An engine's own, between its loading and its first turn: it may have memory to prepare."""
ALL_KINDS = frozenset({"prefill", "decode", "batch", "mixed", "prefix", "http", "start"})


class WorkerEngine:
    """See ``base.Engine``. The worker starts with the first request and is paused between turns."""

    def __init__(
        self,
        *,
        peer: str,
        name: str,
        python: str,
        module: str,
        model: Model,
        path: str,
        limits: Limits,
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        kinds: frozenset[str] = ALL_KINDS,
        max_batch: int = 1 << 30,
        http: HttpServer | None = None,
    ) -> None:
        self.peer = peer
        self.name = name
        self._command = [python, "-m", "benchmarks.worker", module]
        self._environment = dict(environment or {})
        self._load = {
            "op": "load",
            "model": {"path": path, "is_trained": model.is_trained, **(options or {})},
            "limits": dataclasses.asdict(limits),
        }
        self._kinds = kinds
        self._max_batch = max_batch
        self._http = http
        self._program: Program | None = None
        self._broken: str | None = None

    def cannot(self, cell: Cell) -> str | None:
        """See ``Engine.cannot``; a model that could not be loaded is not tried again."""
        if self._broken is not None:
            return self._broken
        if cell.kind not in self._kinds or (cell.kind == "http" and self._http is None):
            return f"has no way to run {cell.kind}"
        if cell.kind == "decode" and cell.batch > self._max_batch:
            return f"runs {self._max_batch} sequences at most"
        return None

    def measure(self, cell: Cell, requests: Sequence[Request]) -> tuple[Metrics, list[Answer]]:
        """See ``Engine.measure``."""
        if cell.kind == "http":
            assert self._http is not None
            return self._http.measure(cell, requests), []
        answers = self.run(requests, cached=cell.kind == "decode")
        return figures(cell, requests, answers), answers

    def run(
        self, requests: Sequence[Request], *, cached: bool = False, greedy: bool = False
    ) -> list[Answer]:
        """Serve requests."""
        message = {
            "op": "run",
            "requests": [dataclasses.asdict(request) for request in requests],
            "cached": cached,
            "greedy": greedy,
        }
        return [Answer.parse(each) for each in self._ask(message)["answers"]]

    def greedy(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``Engine.greedy``."""
        requests = [Request(arrival=0, prompt=ids, max_tokens=max_tokens) for ids in prompts]
        return [answer.token_ids for answer in self.run(requests, greedy=True)]

    def likeliest(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """The ``count`` likeliest next tokens of each prompt."""
        found = self._ask({"op": "likeliest", "prompts": list(prompts), "count": count})
        return [list(ids) for ids in found["token_ids"]]

    def start(self) -> Metrics:
        """See ``Engine.start``: a worker, started, loaded, asked for one token."""
        started = time.perf_counter()
        program = Program(self._command, self._environment, piped=True)
        try:
            request = Request(arrival=0, prompt=[504, 3575, 282, 4649], max_tokens=1)
            talk(program, self._load)
            talk(
                program,
                {
                    "op": "run",
                    "requests": [dataclasses.asdict(request)],
                    "cached": False,
                    "greedy": True,
                },
            )
            seconds = time.perf_counter() - started
            return {"seconds_to_first_token": seconds, "peak_rss_mb": program.peak_rss_mb()}
        finally:
            program.kill()

    def rest(self) -> None:
        """See ``Engine.rest``."""
        if self._program is not None:
            self._program.pause()
        if self._http is not None:
            self._http.rest()

    def close(self) -> None:
        """See ``Engine.close``."""
        if self._program is not None:
            self._program.kill()
            self._program = None
        if self._http is not None:
            self._http.close()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._program is None:
            self._program = Program(self._command, self._environment, piped=True)
            try:
                talk(self._program, self._load)
                time.sleep(SETTLE_SECONDS)
            except ProgramError as error:
                self._broken = f"cannot load the model: {error}"
                self.close()
                raise
        self._program.resume()
        return talk(self._program, message)


def talk(program: Program, message: Mapping[str, Any]) -> dict[str, Any]:
    """Send a message and take its answer. Raises ProgramError if the worker failed."""
    assert program.popen.stdin is not None
    assert program.popen.stdout is not None
    try:
        program.popen.stdin.write(json.dumps(message).encode() + b"\n")
        program.popen.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended; the read below says so
    line = program.popen.stdout.readline()
    if not line:
        program.popen.wait()
        program.check_alive()
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise ProgramError(reply["error"])
    return reply
