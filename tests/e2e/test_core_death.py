"""kill -9 of the engine core under load: everybody is told, and the server comes back."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.serve_process import ServeProcess
from helpers.tiny_models import tiny_gguf

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

STREAMS = 8
TOLD_SECONDS = 2.0
"""Until everybody has heard of it; it takes some milliseconds, but a machine may be busy."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"max_position_embeddings": 8192}
    return str(tiny_gguf(tmp_path_factory.mktemp("model"), "llama_tied", "Q8_0", **sizes))


@pytest.fixture
def process(model: str) -> Iterator[ServeProcess]:
    process = ServeProcess(model, "--served-model-name", "m", "--threads", "1")
    yield process
    if process.child.poll() is None:
        process.end()


def post(url: str, body: dict[str, Any]) -> tuple[int, str, float]:
    """Status, body and the moment of the end; a stream is read as long as it lasts."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode(), time.monotonic()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), time.monotonic()


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=120) as response:
            return response.status, None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def wait_for(url: str, status: int) -> Any:
    """The body of the first answer with this status."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found, body = get(url)
        if found == status:
            return body
        time.sleep(0.02)
    raise AssertionError(f"{url} never answered {status}")


def test_everybody_is_told_and_it_comes_back(process: ServeProcess) -> None:
    url = process.url
    endless = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True}
    short = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    before = json.loads(post(url, short)[1])["choices"]
    for round_number in range(2):
        with ThreadPoolExecutor(STREAMS + 1) as pool:
            open_ones = [
                pool.submit(post, url, {**endless, "stream": i % 2 == 0}) for i in range(STREAMS)
            ]
            deadline = time.monotonic() + 60
            while json.loads(_load(url))["server_load"] < STREAMS:
                assert time.monotonic() < deadline
            [pid] = process.core_pids()
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            body = wait_for(f"{url}/health", 503)
            assert body["status"] in ("dead", "restarting"), body
            assert "killed by SIGKILL" in body["error"]
            answers = [each.result() for each in open_ones]
        for index, (status, text, ended) in enumerate(answers):
            assert ended - killed < TOLD_SECONDS
            assert text.count('"code":"engine_dead"') == 1
            assert '"finish_reason":"' not in text
            if index % 2:
                assert status == 500
            elif status == 200:  # else it had not begun
                assert text.endswith("data: [DONE]\n\n")
        wait_for(f"{url}/ready", 200)
        [other] = process.core_pids()
        assert other != pid
        status, text, _ = post(url, short)
        assert status == 200
        assert json.loads(text)["choices"] == before, f"round {round_number}: other bytes"
    assert process.end() == 0
    log = "".join(process.lines)
    assert "killed by SIGKILL" in log
    assert "starting it again (2 of 5 in 10 minutes)" in log
    assert "Traceback" not in log


def _load(url: str) -> str:
    with urllib.request.urlopen(f"{url}/load", timeout=60) as response:
        found: str = response.read().decode()
    return found


def test_enough_is_enough(model: str) -> None:
    process = ServeProcess(model, "--threads", "1", "--restart-core", "1")
    url = process.url
    for _ in range(2):
        wait_for(f"{url}/ready", 200)
        [pid] = process.core_pids()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while pid in process.core_pids() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert process.wait() == 1
    assert "killed by SIGKILL" in process.lines[-1]
    assert "(restarts within 10 minutes: 1)" in process.lines[-1]
