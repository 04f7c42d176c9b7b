"""Keys, hosts, origins, sizes: what the server refuses to strangers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.live_server import LiveServer, live_server

from twostep.server.middleware.api_key import OPEN_PATHS
from twostep.server.middleware.host_check import host_name
from twostep.server.routes import operations

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def test_every_path_needs_the_key_but_a_few() -> None:
    with live_server(api_keys=("first", "second")) as server:
        table = server.call(lambda: operations(server.state))
        paths = [(method, each.path) for each in table for method in each.methods]
        paths += [
            ("GET", "/openapi.json"),
            ("GET", "/docs"),
            ("GET", "/nonsense"),
            ("DELETE", "/v1/models"),
        ]
        paths = [(m, p.replace("{model:path}", "tiny")) for m, p in paths]
        asked = {*paths, *(("GET", p) for _, p in paths), *(("POST", p) for _, p in paths)}
        for method, path in asked:
            answer = server.send(method, path, headers={"Content-Type": "application/json"})
            if path in OPEN_PATHS:
                assert answer.status != 401, path
                continue
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.error["code"] == "invalid_api_key"
            assert answer.error["type"] == "authentication_error"
        for key in ("first", "second"):
            for headers in (
                {"Authorization": f"Bearer {key}"},
                {"Authorization": f"bearer {key}"},
                {"x-api-key": key},
            ):
                assert server.post(CHAT, HI, **headers).status == 200
        for headers in (
            {"Authorization": "Bearer third"},
            {"Authorization": "Bearer "},
            {"Authorization": "Basic first"},
            {"Authorization": "first"},
            {"x-api-key": ""},
            {"x-api-key": "firs"},
        ):
            assert server.post(CHAT, HI, **headers).status == 401


def test_open_paths_are_these() -> None:
    """A ratchet: whoever opens a path says so here."""
    assert {"/health", "/live", "/ready", "/ping", "/metrics", "/version"} == OPEN_PATHS


def test_server_info_tells_no_key_and_no_path() -> None:
    with live_server(api_keys=("hush",)) as server:
        answer = server.get("/server_info", **{"x-api-key": "hush"})
        assert b"hush" not in answer.body
        assert b"/secret" not in answer.body
        assert answer.json["server"]["api_keys"] == 1


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LOCALHOST.", True),
        ("a.localhost", True),
        ("127.0.0.1:1", True),
        ("[::1]:80", True),
        ("192.168.0.5", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("evillocalhost", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_host(shared_host_server: LiveServer, host: str, is_allowed: bool) -> None:
    answer = shared_host_server.send("GET", "/version", headers={"Host": host})
    assert answer.status == (200 if is_allowed else 403)
    if not is_allowed:
        assert answer.error["code"] == "invalid_host"


@pytest.fixture(scope="module")
def shared_host_server() -> Any:
    with live_server(allowed_hosts=("localhost",)) as server:
        yield server


def test_host_name() -> None:
    assert host_name("[::1]:80") == "::1"
    assert host_name("A.example:1") == "a.example"


def test_cors_is_off(server: LiveServer) -> None:
    answer = server.post(CHAT, HI, Origin="https://evil.example")
    assert "access-control-allow-origin" not in answer.headers
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert server.send("OPTIONS", CHAT, headers=headers).status == 405


def test_cors_for_those_that_are_named() -> None:
    origin = "https://page.example"
    with live_server(allowed_origins=(origin,), api_keys=("k",)) as server:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization,content-type"
        answer = server.send("OPTIONS", CHAT, headers=headers)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == origin
        answer = server.post(CHAT, HI, Origin=origin)
        assert answer.status == 401
        assert answer.headers["access-control-allow-origin"] == origin, "pages may read errors"
        headers["Origin"] = "https://other.example"
        answer = server.send("OPTIONS", CHAT, headers=headers)
        assert "access-control-allow-origin" not in answer.headers


def exchange(server: LiveServer, data: bytes) -> bytes:
    """Whatever comes back until the server closes."""
    with server.connect() as sock:
        sock.sendall(data)
        answer = b""
        try:
            while piece := sock.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


def test_headers_are_bounded() -> None:
    with live_server(max_header_bytes=4096, max_headers=20) as server:
        for data in (
            b"GET /version HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 5000 + b"\r\n\r\n",
            b"GET /version HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 30 + b"\r\n",
            b"GET /" + b"v" * 5000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        ):
            answer = exchange(server, data)
            assert answer.startswith(b"HTTP/1.1 431 "), answer[:200]
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "header_too_large"
        assert server.get("/version").status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 nonsense\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_what_is_no_http(server: LiveServer, data: bytes) -> None:
    answer = exchange(server, data)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("target", [b"*", b"/v1/models/%ff%fe", b"//version", b"/../version"])
def test_odd_paths(server: LiveServer, target: bytes) -> None:
    for method in (b"GET", b"OPTIONS", b"PATCH"):
        data = method + b" " + target + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        answer = exchange(server, data)
        assert answer[9:12] in (b"404", b"405")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def test_a_request_that_does_not_go_on(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from twostep.server.http_protocol import HttpProtocol

    monkeypatch.setattr(HttpProtocol, "receive_timeout", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    for data in (b"", b"GET /ver", head + b"Content-Length: 50\r\n\r\n{"):
        assert exchange(server, data) == b""


def test_connections_are_bounded(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from twostep.server.http_protocol import HttpProtocol

    monkeypatch.setattr(HttpProtocol, "max_connections", 2)
    server.get("/version")  # the ones before have gone when this one is answered
    with server.connect() as first, server.connect() as second:
        for sock in (first, second):
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        answer = exchange(server, b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"server_overloaded" in answer


def test_pipelined_and_chunked_requests(server: LiveServer) -> None:
    """HTTP as some clients speak it."""
    body = json.dumps(HI).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    for byte in range(0, len(body), 7):
        piece = body[byte : byte + 7]
        chunked += b"%x\r\n%b\r\n" % (len(piece), piece)
    chunked += b"0\r\n\r\n"
    plain = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    last = b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    answer = exchange(server, chunked + plain + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"object":"chat.completion"') == 2


def test_expect_100_continue(server: LiveServer) -> None:
    body = json.dumps(HI).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()
    head += b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with server.connect() as sock:
        sock.sendall(head)
        assert sock.recv(100).startswith(b"HTTP/1.1 100 Continue")
        sock.sendall(body)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_head_on_every_get(server: LiveServer) -> None:
    for operation in server.call(lambda: operations(server.state)):
        if "GET" in operation.methods:
            path = operation.path.replace("{model:path}", "tiny")
            answer = server.send("HEAD", path)
            assert (answer.status, answer.body) == (200, b""), path
