"""Nearly valid requests against the server, a sample of what `python tests/fuzz` sends."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.cases import Case, make_case
from fuzz.session import SERVER_FLAGS, Report, Session
from fuzz.wire import Connection
from helpers.live_server import LiveServer, live_server
from helpers.serve_process import ServeProcess
from helpers.tiny_models import tiny_hf_dir

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    model = tiny_hf_dir(tmp_path_factory.mktemp("model"), "qwen3")
    process = ServeProcess(str(model), *SERVER_FLAGS)
    yield process
    assert process.end() == 0


def run(session: Session, requests: int) -> Report:
    return asyncio.run(session.run(requests, lambda count: None))


def told(report: Report) -> str:
    findings = [
        f"case {each.case.number}: {each.what}\n  {(each.smallest or each.case).curl()[:2000]}"
        for each in report.findings
    ]
    return "\n".join([*report.after, *findings])


@pytest.mark.native
def test_two_thousand_requests(server: ServeProcess) -> None:
    report = run(Session(server, seed=2026, concurrency=16), 2000)
    assert report.is_clean, told(report)
    assert report.requests == 2000
    # It is no fuzzing if nearly everything is refused at the door, or nothing is.
    assert report.outcomes["200"] > 500
    assert len([outcome for outcome in report.outcomes if outcome.startswith("4")]) > 8


@pytest.mark.native
def test_a_body_behind_a_length_of_nothing(server: ServeProcess) -> None:
    """Case 24246 of seed 2: to the server the body is the next request, and no HTTP. It closes
    while the client sends; the fuzzer took that for a broken connection."""
    headers = (("Content-Type", "application/json"), ("Content-Length", "0"))
    lie = Case(1, "POST", "/v1/completions", headers, b"x" * (60 << 20), "torn")

    async def main() -> int:
        connection = Connection(int(server.url.rpartition(":")[2]))
        assert await connection.exchange(lie) is None
        response = await connection.exchange(Case(2, "GET", "/ready"))
        connection.close()
        return response.status if response else 0

    assert asyncio.run(main()) == 200


@pytest.mark.native
def test_schemathesis(server: ServeProcess, tmp_path: Path) -> None:
    """What the API's own description allows and forbids, from somebody else's generator."""
    checks = "not_a_server_error,content_type_conformance,response_schema_conformance"
    cores = server.core_pids()
    assert cores
    child = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        + ["--checks", checks, "--phases", "fuzzing", "--max-examples", "10", "--workers", "4"]
        + ["--seed", "1", "--generation-database", "none", "--request-timeout", "60"]
        + ["--suppress-health-check", "all", "--no-color"],
        capture_output=True,
        text=True,
        timeout=550,
        cwd=tmp_path,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert re.search(r"[1-9]\d* generated", child.stdout), child.stdout
    assert server.core_pids() == cores


def test_a_case_is_a_function_of_its_seed_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of nothing else: the time was in gzip's header once."""
    cases = [make_case(5, number) for number in range(300)]
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert cases == [make_case(5, number) for number in range(300)]
    assert len({case.encode() for case in cases}) > 250
    assert {case.how for case in cases} == {"whole", "chunked", "torn", "hang_up"}


class Thread:
    """A server in a thread, as a session sees one of its own process."""

    def __init__(self, server: LiveServer) -> None:
        self.url = server.url
        self.lines: list[str] = []

    def core_pids(self) -> list[int]:
        return []


def test_what_breaks_is_found_and_made_small() -> None:
    """A core that fails requests with a bias, among 150 that it serves."""
    with live_server(structured_outputs=True) as server:
        reply = server.core.reply

        def fail_some(request: object) -> str:
            params = request.sampling_params
            server.core.fail_after = 1 if params.logit_bias else None
            return reply(request)

        server.call(lambda: setattr(server.core, "reply", fail_some))
        session = Session(Thread(server), seed=1, concurrency=1)
        report = run(session, 150)
    assert report.findings
    for finding in report.findings:
        assert "500" in finding.what or "in a stream" in finding.what
        assert finding.smallest is not None
        assert b"logit_bias" in finding.smallest.body
        assert len(finding.smallest.body) < 120
        assert "logit_bias" in finding.smallest.curl()
