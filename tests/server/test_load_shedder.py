"""A full queue answers at the door: what is said there, and who is let through to be told more."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.live_server import LiveServer, live_server

from twostep.server import launcher
from twostep.server.http import JsonEndpoint
from twostep.server.http_protocol import HttpProtocol
from twostep.server.load_shedder import LoadShedder

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@contextlib.contextmanager
def full_server(**options: Any) -> Iterator[LiveServer]:
    """A server whose queue has no room."""
    with live_server(max_num_queued_reqs=1, **options) as server:
        fill(server)
        yield server


def fill(server: LiveServer, waiting: int = 1) -> None:
    server.call(lambda: setattr(server.state.in_flight, "queued_reqs", waiting))


def request(path: str = COMPLETIONS, *headers: str, body: bytes = b'{"prompt": "Once"}') -> bytes:
    lines = [
        f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json",
        f"Content-Length: {len(body)}", *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + body


def read_answers(sock: socket.socket, count: int) -> list[bytes]:
    """So many whole answers of one connection."""
    data, answers = b"", []
    while len(answers) < count:
        head, mark, rest = data.partition(b"\r\n\r\n")
        length = int((re.search(rb"content-length: (\d+)", head) or [0, b"0"])[1])
        if not mark or len(rest) < length:
            piece = sock.recv(65536)
            assert piece, f"closed behind {data!r}"
            data += piece
            continue
        answers.append(head + mark + rest[:length])
        data = rest[length:]
    return answers


@pytest.fixture
def no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gets as far as the endpoints."""

    async def fail(self: Any, scope: Any, receive: Any, send: Any) -> None:
        pytest.fail("went through the layers")

    monkeypatch.setattr(JsonEndpoint, "__call__", fail)


@pytest.mark.usefixtures("no_layers")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings"])
def test_the_answer_at_the_door(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same as the layers', byte by byte but for the date; counted and logged as theirs."""
    with full_server(root_path="/api") as server, server.connect() as sock:
        with caplog.at_level(logging.INFO, "twostep.server.access"):
            sock.sendall(request(path, "X-Request-Id: mine.7"))
            [answer] = read_answers(sock, 1)
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert lines[0] == "HTTP/1.1 503 Service Unavailable"
        fields = dict(line.split(": ", 1) for line in lines[1:])
        assert fields.pop("date").endswith(" GMT")
        assert fields == {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "retry-after": "1",
            "x-request-id": "mine.7",
        }
        error = json.loads(body)["error"]
        assert error["code"] == "server_overloaded"
        assert "--max-num-queued-reqs" in error["message"]
        line = next(record.getMessage() for record in caplog.records)
        assert re.fullmatch(rf"POST /api{path} 503 0\.0 ms mine\.7", line)
        metrics = server.get("/metrics").body.decode()
        counted = f'http_requests_total{{handler="{path}",method="POST",status="5xx"}} 1.0'
        assert counted in metrics


def test_the_layers_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with full_server() as server:
        at_the_door = server.complete()
        monkeypatch.setattr(LoadShedder, "answer", lambda *_: None)
        by_layers = server.complete()
    assert at_the_door.status == by_layers.status == 503
    assert at_the_door.body == by_layers.body
    assert at_the_door.headers.keys() == by_layers.headers.keys()


def test_who_gets_another_answer_is_let_through() -> None:
    options = {
        "api_keys": ("secret",), "allowed_hosts": ("localhost",), "allowed_origins": ("http://a",),
    }  # fmt: skip
    key = {"Authorization": "Bearer secret"}
    with full_server(**options) as server:
        assert server.complete().status == 401
        assert server.post(COMPLETIONS, {}, **key).status == 503
        assert server.post(COMPLETIONS, {}, **key, Host="evil.example").status == 403
        page = server.post(COMPLETIONS, {}, **key, Origin="http://a")
        assert page.status == 503
        assert page.headers["access-control-allow-origin"] == "http://a"
        assert server.send("GET", COMPLETIONS, headers=key).status == 405
        assert server.post("/v1/nothing", {}, **key).status == 404
        assert server.post("/tokenize", {"prompt": "Once"}, **key).status == 200
        fill(server, 0)
        assert server.post(COMPLETIONS, {"prompt": "Once"}, **key).status == 200


def test_layers_of_the_operator_see_the_refused() -> None:
    seen = []

    def layer(app: Any) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["path"])
            await app(scope, receive, send)

        return call

    with full_server(middleware=[layer]) as server:
        assert server.complete().status == 503
    assert seen == [COMPLETIONS]


@pytest.mark.parametrize(
    "data",
    [
        request(COMPLETIONS, "Connection: close"),
        request().replace(b"HTTP/1.1", b"HTTP/1.0"),
        request(COMPLETIONS, "Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
    ids=["close", "1.0", "1.0 that would go on"],
)
def test_connections_that_end_are_ended(data: bytes) -> None:
    with full_server() as server, server.connect() as sock:
        sock.sendall(data)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in answer.lower()


def test_who_waits_for_100_continue_is_answered() -> None:
    with full_server() as server, server.connect() as sock:
        head, _, body = request(COMPLETIONS, "Expect: 100-continue").partition(b"\r\n\r\n")
        sock.sendall(head + b"\r\n\r\n")
        [answer] = read_answers(sock, 1)
        assert answer.startswith(b"HTTP/1.1 503 ")
        sock.sendall(body + request("/tokenize"))
        [answer] = read_answers(sock, 1)
        assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("no_layers")
def test_answers_are_in_the_order_of_requests() -> None:
    """Several in one packet, bodies in pieces."""
    with full_server() as server, server.connect() as sock:
        data = b"".join(request(COMPLETIONS, f"X-Request-Id: {i}") for i in range(5))
        for start in range(0, len(data), 97):
            sock.sendall(data[start : start + 97])
        answers = read_answers(sock, 5)
        ids = re.findall(rb"x-request-id: (\d)", b"".join(answers))
        assert ids == [b"0", b"1", b"2", b"3", b"4"]


def test_a_request_behind_one_that_runs_waits_for_it() -> None:
    with live_server(max_num_queued_reqs=1) as server:
        server.core.stall_after = 0
        stream = server.open_stream(COMPLETIONS, {"prompt": "Once", "stream": True})
        server.wait_until(lambda: server.state.in_flight.queued_reqs == 1)
        stream.sock.sendall(request(COMPLETIONS, "X-Request-Id: second"))
        server.wait_until(
            lambda: any(p.pipeline for p in server.server._uvicorn.server_state.connections)
        )
        assert server.complete().status == 503
        stream.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            stream.sock.recv(1000)
        stream.close()


def test_a_client_that_reads_no_answers_is_not_given_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Forty thousand requests on one connection, and nobody reads: what it has to be told stays
    with it, and is lost without a word when it hangs up."""
    with full_server() as server:
        with server.connect() as sock:
            sock.settimeout(2)
            data = request() * 100
            with contextlib.suppress(TimeoutError):
                for _ in range(400):
                    sock.sendall(data)

            def unsent() -> int:
                connections = server.server._uvicorn.server_state.connections
                return max(each.transport.get_write_buffer_size() for each in connections)

            server.wait_until(lambda: unsent() > 0)
            assert server.complete().status == 503
            assert server.call(unsent) < 200_000
        assert server.complete().status == 503
        server.wait_until(lambda: not server.server._uvicorn.server_state.connections)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("no_layers")
def test_idle_connections_of_the_refused_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "KEEP_ALIVE_SECONDS", 0.2)
    with full_server() as server, server.connect() as sock:
        for _ in range(2):
            sock.sendall(request())
            read_answers(sock, 1)
        assert sock.recv(100) == b""


@pytest.mark.usefixtures("no_layers")
def test_a_refused_body_that_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "receive_timeout", 0.2)
    with full_server() as server, server.connect() as sock:
        sock.sendall(request()[:-5])
        read_answers(sock, 1)
        assert sock.recv(100) == b""
