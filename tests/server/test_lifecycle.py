"""From the first byte on the socket to the last: loading, draining, the engine's death."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import LiveServer, live_server

from twostep.contracts.errors import EngineDeadError, ModelNotFoundError, UsageError
from twostep.server.launcher import listen, url_of
from twostep.server.logs import set_up_logging

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


def test_while_loading() -> None:
    with live_server(load_at_once=False) as server:
        server.wait_until(lambda: server.state.phase == "weights")
        answer = server.chat()
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.error["code"] == "loading"
        assert answer.error["type"] == "service_unavailable_error"
        assert "weights 42 %" in answer.error["message"]
        for path in ("/health", "/ready", "/ping"):
            answer = server.get(path)
            assert answer.status == 503
            assert answer.json == {"status": "loading", "phase": "weights", "percent": 42}
            assert answer.headers["retry-after"] == "1"
        assert server.get("/live").status == 200
        assert server.get("/version").status == 200
        assert server.get("/v1/models").status == 503
        assert server.get("/nonsense").status == 404
        server.finish_loading()
        server.wait_until(lambda: server.state.status == "ready")
        assert server.get("/ready").status == 200
        assert server.chat().status == 200


def test_a_load_that_fails_ends_the_server() -> None:
    server = LiveServer(load_at_once=False)
    server.finish_loading(ModelNotFoundError("no model 'x': check the name"))
    server.join()
    assert isinstance(server.error, ModelNotFoundError)


def test_stop_while_loading() -> None:
    server = LiveServer(load_at_once=False)
    server.request_stop()
    server.join()
    assert server.error is None


def test_b58_drain() -> None:
    server = LiveServer()
    server.core.stall_after = 2
    stream = server.open_stream(CHAT, BODY)
    stream.read_until(b'"content":"e"')
    server.request_stop()
    server.wait_until(lambda: server.state.status == "draining")
    answer = server.get("/ready")
    assert answer.status == 503
    assert answer.json["status"] == "draining"
    assert server.get("/health").status == 200, "it still works for those that run"
    refused = server.chat()
    assert refused.status == 503
    assert refused.error["code"] == "shutting_down"
    assert refused.headers["retry-after"]
    server.call(server.core.go)
    data = stream.read_to_end()
    assert b'"finish_reason":"stop"' in data
    assert data.count(b"data: [DONE]") == 1
    stream.close()
    server.join()
    assert server.error is None


@pytest.mark.parametrize("how", ["timeout", "second"])
def test_b58_cut(how: str) -> None:
    """What does not end in time ends with an error, never like a success."""
    server = LiveServer(shutdown_timeout=0.1 if how == "timeout" else 60)
    server.core.stall_after = 2
    stream = server.open_stream(CHAT, BODY)
    whole = server.open_stream(CHAT, {**BODY, "stream": False})
    stream.read_until(b'"content":"e"')
    server.wait_until(lambda: len(server.core.running) == 2)
    server.request_stop()
    if how == "second":
        server.wait_until(lambda: server.state.status == "draining")
        server.request_stop()
    data = stream.read_to_end()
    assert b'"code":"shutting_down"' in data
    assert data.count(b"data: [DONE]") == 1
    assert b'"finish_reason":"' not in data
    assert b" 503 " in whole.read_until(b"}}").splitlines()[0]
    for each in (stream, whole):
        each.close()
    server.join()
    assert server.error is None
    assert not server.core.running


def test_an_idle_server_stops_at_once() -> None:
    server = LiveServer(shutdown_timeout=60)
    server.request_stop()
    server.join()


def test_b60_stalled_engine() -> None:
    with live_server() as server:
        assert server.get("/health").status == 200
        server.core.healthy = False
        for path in ("/health", "/ready", "/ping"):
            answer = server.get(path)
            assert answer.status == 503
            assert answer.json["status"] == "stalled"
        assert server.send("POST", "/ping").status == 503
        assert server.get("/live").status == 200
        server.core.healthy = True
        assert server.get("/health").status == 200


def test_b58_dead_engine() -> None:
    server = LiveServer(max_core_restarts=0)
    server.core.stall_after = 2
    stream = server.open_stream(CHAT, BODY)
    whole = server.open_stream(CHAT, {**BODY, "stream": False})
    stream.read_until(b'"content":"e"')
    server.wait_until(lambda: len(server.core.running) == 2)
    server.call(server.core.die)
    data = stream.read_to_end()
    assert b'"code":"engine_dead"' in data
    assert data.count(b"data: [DONE]") == 1
    assert b" 500 " in whole.read_until(b"}}").splitlines()[0]
    for each in (stream, whole):
        each.close()
    server.join()
    assert isinstance(server.error, EngineDeadError), "so the process exits with 1"


def kill(server: LiveServer) -> None:
    """The core dies, and the next one is not loaded until ``finish_loading``."""
    server._may_load.clear()
    server.call(server.core.die)
    server.wait_until(lambda: server.state.status == "restarting")


def test_an_engine_that_died_is_started_again() -> None:
    """Open requests end with an error at once; new ones get 503 until the new one is there."""
    with live_server() as server:
        assert server.complete(max_tokens=4).status == 200
        server.core.stall_after = 2
        stream = server.open_stream(CHAT, BODY)
        whole = server.open_stream(CHAT, {**BODY, "stream": False})
        stream.read_until(b'"content":"e"')
        server.wait_until(lambda: len(server.core.running) == 2)
        started = time.monotonic()
        kill(server)
        data = stream.read_to_end()
        assert b" 500 " in whole.read_until(b"}}").splitlines()[0]
        assert time.monotonic() - started < 2
        assert data.count(b'"code":"engine_dead"') == 1
        assert b'"finish_reason":"' not in data
        for each in (stream, whole):
            each.close()
        server.wait_until(lambda: server.state.phase == "weights")
        answer = server.chat()
        assert (answer.status, answer.error["code"]) == (503, "engine_restarting")
        assert "weights 42 %" in answer.error["message"]
        assert answer.headers["retry-after"] == "1"
        for path in ("/health", "/ready"):
            answer = server.get(path)
            assert answer.status == 503
            assert answer.json == {
                "status": "restarting",
                "phase": "weights",
                "percent": 42,
                "error": "the engine core has stopped: killed by a test",
            }
        assert server.get("/live").status == 200
        assert server.get("/metrics").status == 200
        server.finish_loading()
        server.wait_until(lambda: server.state.status == "ready")
        assert server.get("/ready").status == server.get("/health").status == 200
        assert server.chat().json["choices"][0]["message"]["content"] == "Hello there."
        metrics = server.get("/metrics").body.decode()
        assert re.search(r"^twostep:engine_restarts_total{.*} 1.0$", metrics, re.MULTILINE)
        assert re.search(r"^vllm:num_requests_running{.*} 0.0$", metrics, re.MULTILINE)
        done = re.findall(r'^vllm:request_success_total{.*"(?:stop|length)".*} (\d)', metrics, re.M)
        assert sum(map(int, done)) == 2, "counters go on: one before, one after"


def test_not_again_and_again() -> None:
    """The second restart waits a second; when there were enough, the server ends and says so."""
    server = LiveServer(max_core_restarts=2)
    for wait in (0.0, 1.0):
        kill(server)
        server.finish_loading()
        started = time.monotonic()
        server.wait_until(lambda: server.state.status == "ready")
        assert time.monotonic() - started >= 0.9 * wait
        assert server.chat().status == 200
    server.call(server.core.die)
    server.join()
    assert isinstance(server.error, EngineDeadError)
    assert "(restarts within 10 minutes: 2)" in str(server.error)


def test_restarts_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.server.launcher.RESTART_WINDOW_SECONDS", 0.0)
    with live_server(max_core_restarts=1) as server:
        for _ in range(3):
            kill(server)
            server.finish_loading()
            server.wait_until(lambda: server.state.status == "ready")
        assert server.chat().status == 200


def test_a_new_engine_that_dies_while_it_loads_counts() -> None:
    server = LiveServer(max_core_restarts=2)
    kill(server)
    server.finish_loading(EngineDeadError("the engine core ended while loading the model"))
    server.join()
    assert "while loading the model (restarts within 10 minutes: 2)" in str(server.error)


def test_a_model_that_has_gone_meanwhile_ends_the_server() -> None:
    server = LiveServer()
    kill(server)
    server.finish_loading(ModelNotFoundError("no such file"))
    server.join()
    assert isinstance(server.error, ModelNotFoundError)


@pytest.mark.parametrize("pausing", [False, True])
def test_stop_while_it_is_started_again(pausing: bool) -> None:
    server = LiveServer()
    if pausing:
        server.call(lambda: server.server._restarts.extend([time.monotonic()] * 4))
    kill(server)
    server.request_stop()
    server.join()
    assert server.error is None


# -- sockets ----------------------------------------------------------------------------------


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}.*--port") as caught:
            listen("127.0.0.1", port)
        assert caught.value.exit_code == 2


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(UsageError):
        listen("203.0.113.7", 0)


def test_port_0_takes_a_free_one() -> None:
    with listen("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = listen("", 0, path)
    assert url_of(first) == f"unix:{path}"
    with pytest.raises(UsageError, match="--uds"):
        listen("", 0, path)  # somebody listens there
    first.close()
    listen("", 0, path).close()  # nobody does any more
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="--uds"):
        listen("", 0, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "x"


def test_serving_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with live_server(uds=path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(50)
        client.connect(path)
        client.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")


# -- logs -------------------------------------------------------------------------------------


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Any:
    """A log in a buffer; what was set up before comes back."""
    loggers = [logging.getLogger(name) for name in ("twostep", "uvicorn")]
    before = [(each.handlers[:], each.propagate, each.level) for each in loggers]
    buffer = io.StringIO()
    set_up_logging(request.param, "info", buffer)
    yield buffer
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.mark.parametrize("log", ["text", "json"], indirect=True)
def test_access_log(log: io.StringIO) -> None:
    with live_server(enable_log_requests=True) as server:
        answer = server.chat("a secret prompt", stop=["a secret stop"])
        for path in ("/health", "/ready", "/ping", "/live", "/metrics"):
            server.get(path)
        server.get("/v1/mod%0aels")
    text = log.getvalue()
    assert "secret" not in text
    assert f"POST {CHAT} 200" in text
    assert answer.headers["x-request-id"] in text
    assert "/health" not in text
    lines = text.splitlines()
    assert sum("/v1/mod" in line for line in lines) == 1
    assert not any(line.startswith("els") for line in lines), "a path cannot start a line"
    if lines[0].startswith("{"):
        assert {"time", "level", "logger", "message"} <= set(json.loads(lines[0]))
        for line in lines:
            json.loads(line)
