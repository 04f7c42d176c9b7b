"""Many cases against one live server, and what is wrong with it afterwards."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from fuzz.cases import Case, make_case
from fuzz.rules import problem
from fuzz.shrink import shrink
from fuzz.wire import Connection, Response
from helpers.serve_process import ServeProcess

PROBE = json.dumps({"prompt": "Once upon", "max_tokens": 8, "temperature": 0}).encode()
PROBE_EVERY = 500
"""Cases between two looks at the server's health and at the text it gives to a plain request."""
MAX_FINDINGS = 20
_HANG = "no answer"
SERVER_FLAGS = ["--served-model-name", "tiny", "--max-model-len", "64", "--threads", "1"]
SERVER_FLAGS += ["--kv-cache-memory-bytes", "4MiB", "--max-num-seqs", "64"]
SERVER_FLAGS += ["--disable-uvicorn-access-log", "--disable-log-stats"]


@dataclasses.dataclass
class Finding:
    """A request that must not do what it does."""

    case: Case
    what: str
    smallest: Case | None = None


@dataclasses.dataclass
class Report:
    """What came of a session."""

    seed: int
    requests: int = 0
    seconds: float = 0.0
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Status and error code, or how the client left → how often."""
    paths: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    """Of one kind the first only."""
    after: list[str] = dataclasses.field(default_factory=list)
    """What is wrong with the server as a whole."""

    @property
    def is_clean(self) -> bool:
        return not self.findings and not self.after


class Session:
    """Sends cases 0 to ``requests`` - 1 of a seed to a server over several connections."""

    def __init__(
        self, server: ServeProcess, seed: int, *, concurrency: int = 8, patience: float = 60.0
    ) -> None:
        """``patience``: seconds after which an answer counts as hanging."""
        self._server = server
        self._port = int(server.url.rpartition(":")[2])
        self._cores = server.core_pids()
        self._concurrency = concurrency
        self._patience = patience
        self._plain: bytes | None = None
        """What the plain request got before anything else was sent."""
        self._kinds: set[str] = set()
        self.report = Report(seed)

    async def run(self, requests: int, on_progress: Callable[[int], Any]) -> Report:
        """Send them all, shrink what breaks, look at the server at the end."""
        started = time.monotonic()
        await self._probe()
        numbers = iter(range(requests))

        async def work() -> None:
            connection = Connection(self._port)
            for number in numbers:
                if len(self.report.findings) >= MAX_FINDINGS or self.report.after:
                    break
                await self._one(connection, make_case(self.report.seed, number))
                on_progress(1)
                if number % PROBE_EVERY == PROBE_EVERY - 1:
                    await self._probe()
            connection.close()

        await asyncio.gather(*(work() for _ in range(self._concurrency)))
        await self._look_at_the_end()
        self.report.seconds = time.monotonic() - started
        for finding in self.report.findings:
            if not self.report.after:  # a server that hangs or has ended shows nothing more
                finding.smallest = await shrink(finding.case, self._breaks_like(finding))
        return self.report

    async def _one(self, connection: Connection, case: Case) -> None:
        what, response = await self._try(connection, case)
        self.report.requests += 1
        self.report.paths[_known(case.path)] += 1
        self.report.outcomes[_outcome(case, response)] += 1
        if what is not None and what.startswith(_HANG):
            self.report.after.append(f"case {case.number}: {what}; the session ended there")
        if what is not None and (kind := _kind(case, what)) not in self._kinds:
            self._kinds.add(kind)
            self.report.findings.append(Finding(case, what))

    async def _try(self, connection: Connection, case: Case) -> tuple[str | None, Response | None]:
        try:
            async with asyncio.timeout(self._patience):
                response = await connection.exchange(case)
        except TimeoutError:
            return f"{_HANG} within {self._patience:.0f} s", None
        except (ConnectionError, ValueError) as error:
            return f"the connection broke: {error!r}", None
        return problem(case, response), response

    def _breaks_like(self, finding: Finding) -> Callable[[Case], Any]:
        wanted = _kind(finding.case, finding.what)

        async def breaks(case: Case) -> bool:
            connection = Connection(self._port)
            what, _ = await self._try(connection, case)
            connection.close()
            return what is not None and _kind(case, what) == wanted

        return breaks

    async def _ask(self, method: str, path: str, body: bytes = b"") -> Response:
        connection = Connection(self._port)
        headers = (("Content-Type", "application/json"),) if body else ()
        try:
            async with asyncio.timeout(self._patience):
                response = await connection.exchange(Case(-1, method, path, headers, body))
        finally:
            connection.close()
        assert response is not None, f"{path}: no answer"
        return response

    async def _probe(self) -> None:
        """The server is well, and a plain request gets the text that it got at first."""
        try:
            health = await self._ask("GET", "/health")
            answer = await self._ask("POST", "/v1/completions", PROBE)
        except (OSError, AssertionError, TimeoutError) as error:
            self.report.after.append(f"a plain request fails: {error!r}")
            return
        if (health.status, answer.status) != (200, 200):
            self.report.after.append(f"/health {health.status}, a plain request {answer.status}")
            return
        text = json.dumps(json.loads(answer.body)["choices"]).encode()
        self._plain = self._plain or text
        if text != self._plain:
            self.report.after.append(f"a plain request got {text!r}, at first {self._plain!r}")

    async def _look_at_the_end(self) -> None:
        if not self.report.after:
            await self._probe()
        if self.report.after:
            return
        deadline = time.monotonic() + self._patience
        while (load := json.loads((await self._ask("GET", "/load")).body)["server_load"]) > 0:
            if time.monotonic() > deadline:
                self.report.after.append(f"{load} requests go on without their clients")
                break
            await asyncio.sleep(0.05)
        if self._server.core_pids() != self._cores:
            self.report.after.append("the engine core is another process than at first")
        metrics = (await self._ask("GET", "/metrics")).body.decode()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            values = [
                float(line.rpartition(" ")[2])
                for line in metrics.splitlines()
                if line.startswith(f"vllm:{name}{{")
            ]
            if not values or any(values):
                self.report.after.append(f"idle, but {name} is {values}")
        if "Traceback" in (log := "".join(self._server.lines)):
            self.report.after.append(f"the log has a traceback: …{log[log.index('Traceback') :]}")


def _known(path: str) -> str:
    path = path.partition("?")[0]
    return path if len(path) < 40 and path.isascii() else "(odd paths)"


def _outcome(case: Case, response: Response | None) -> str:
    if response is None:
        return {"torn": "torn by the client", "hang_up": "hung up on by the client"}.get(
            case.how, "no answer"
        )
    if response.status < 400 or case.method == "HEAD":
        return str(response.status)
    try:
        return f"{response.status} {json.loads(response.body)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status} (no error in it)"


def _kind(case: Case, what: str) -> str:
    """Findings that are probably the same: the path and the beginning of what is wrong."""
    return f"{_known(case.path)} {what[:40]}"
