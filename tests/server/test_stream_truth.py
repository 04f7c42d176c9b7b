"""What a client can tell from a stream alone: it ended well, or with one error, never neither.

One reader for every fault, on both endpoints: it knows nothing of the server but the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers.live_server import LiveServer, OpenStream, live_server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
REASONS = {"stop", "length", "tool_calls"}


def read(data: bytes, num_choices: int) -> str:
    """``ok``, or the code of the error; AssertionError if the stream leaves a doubt."""
    head, _, rest = data.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"text/event-stream" not in head:
        assert status >= 400
        return str(json.loads(_unchunked(head, rest))["error"]["code"])
    assert status == 200
    blocks = _unchunked(head, rest).decode().split("\n\n")
    assert blocks.pop() == "", "the last event is complete"
    events = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert events.pop() == "[DONE]"
    assert "[DONE]" not in events
    found = [json.loads(event) for event in events]
    finished: set[int] = set()
    for index, chunk in enumerate(found):
        if "error" in chunk:
            assert set(chunk) == {"error"}
            assert index == len(found) - 1, "nothing comes after an error"
            assert len(finished) < num_choices, "not all can have ended well"
            return str(chunk["error"]["code"])
        for choice in chunk["choices"]:
            assert choice["index"] not in finished, "nothing comes after the end of a choice"
            if choice["finish_reason"] is not None:
                assert choice["finish_reason"] in REASONS
                finished.add(choice["index"])
    assert finished == set(range(num_choices))
    return "ok"


def _unchunked(head: bytes, body: bytes) -> bytes:
    if b"transfer-encoding: chunked" not in head.lower():
        return body
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return whole
        whole, body = whole + body[:length], body[length + 2 :]


def start(server: LiveServer, path: str, **fields: Any) -> OpenStream:
    body: dict[str, Any] = {"stream": True, "max_tokens": 200, **fields}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        body.setdefault("prompt", "Hi")
    return server.open_stream(path, body)


def whole(stream: OpenStream) -> bytes:
    """All that the server sends, be it a stream or an error with a length."""
    head = stream.read_until(b"\r\n\r\n").partition(b"\r\n\r\n")[0].lower()
    if b"transfer-encoding: chunked" in head:
        stream.read_to_end()
    else:
        stream.read_until(b"}}")
    stream.close()
    return stream.received


def outcome(stream: OpenStream, num_choices: int) -> str:
    return read(whole(stream), num_choices)


@pytest.fixture
def talker(server: LiveServer) -> LiveServer:
    """Says enough to be cut anywhere."""
    server.core.reply = lambda request: "all the world is one" * 3
    return server


BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
USAGE = {"stream_options": {"include_usage": True}}


@BOTH
@pytest.mark.parametrize("fields", [{}, {"n": 3, "seed": 1}, {"max_tokens": 3}, USAGE], ids=str)
def test_well(talker: LiveServer, path: str, fields: dict[str, Any]) -> None:
    assert outcome(start(talker, path, **fields), fields.get("n", 1)) == "ok"


@BOTH
@pytest.mark.parametrize("tokens_per_tick", [1, 4, 1000])
@pytest.mark.parametrize("after", [1, 2, 7, 30])
def test_a_request_that_fails(
    talker: LiveServer, path: str, after: int, tokens_per_tick: int
) -> None:
    talker.core.fail_after = after
    talker.core.tokens_per_tick = tokens_per_tick
    for fields in ({}, {"n": 2, "seed": 1}, USAGE, {"stop": ["never"]}):
        assert outcome(start(talker, path, **fields), fields.get("n", 1)) == "internal_error"


def test_one_of_several_prompts_fails(talker: LiveServer) -> None:
    """The one that ended well has its reason; the stream as a whole has failed."""
    talker.core.reply = lambda request: "ab" if len(request.prompt_token_ids) == 1 else "c" * 50
    talker.core.fail_after = 20
    stream = start(talker, COMPLETIONS, prompt=["x", "longer"])
    data = whole(stream)
    assert data.count(b'"finish_reason":"stop"') == 1
    assert read(data, 2) == "internal_error"


@BOTH
def test_the_core_refuses(talker: LiveServer, path: str) -> None:
    talker.core.refuse = "no room for it"
    assert outcome(start(talker, path), 1) == "invalid_value"


def cut(server: LiveServer, path: str, how: Callable[[LiveServer], None], **fields: Any) -> bytes:
    """A stream that has begun, and what came of it when ``how`` happened."""
    server.core.reply = lambda request: "all the world is one" * 3
    server.core.stall_after = 3
    stream = start(server, path, **fields)
    stream.read_until(b'"index":0')
    server.wait_until(lambda: bool(server.core.running))
    how(server)
    return whole(stream)


def die(server: LiveServer) -> None:
    server.call(server.core.die)


def abort(server: LiveServer) -> None:
    engine = server.state.loaded_engine
    assert engine is not None
    server.call(lambda: engine._abort(list(engine._streams)))


def wait(server: LiveServer) -> None:
    """The server's own time limit does it."""


@BOTH
@pytest.mark.parametrize("fields", [{}, {"n": 2, "seed": 1}, USAGE], ids=str)
@pytest.mark.parametrize(
    ("how", "settings", "code"),
    [
        (die, {}, "engine_dead"),
        (die, {"max_core_restarts": 0}, "engine_dead"),
        (abort, {}, "internal_error"),
        (wait, {"request_timeout": 0.3}, "request_timeout"),
        (LiveServer.request_stop, {"shutdown_timeout": 0.05}, "shutting_down"),
    ],
    ids=["death", "death for good", "abort", "timeout", "shutdown"],
)
def test_cut(
    path: str, fields: dict[str, Any], how: Any, settings: dict[str, Any], code: str
) -> None:
    server = LiveServer(**settings)
    try:
        data = cut(server, path, how, **fields)
    finally:
        if how is die and settings:
            server.join()
        else:
            server.stop()
    assert read(data, fields.get("n", 1)) == code


@BOTH
def test_death_before_the_first_token_of_a_stream_that_a_comment_opened(path: str) -> None:
    """The status is out, so the error is an event, and nothing has a reason."""
    with live_server(sse_keep_alive_interval=0.05) as server:
        server.core.stall_after = 0
        stream = start(server, path)
        stream.read_until(b": keep-alive")
        server.call(server.core.die)
        assert outcome(stream, 1) == "engine_dead"


def test_the_reader_sees_through_half_truths() -> None:
    """A test of the test: what it must not take for an end."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    end = b'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n'
    text = b'data: {"choices":[{"index":0,"finish_reason":null}]}\n\n'
    abort_end = end.replace(b"stop", b"abort")
    error = b'data: {"error":{"code":"x"}}\n\n'
    done = b"data: [DONE]\n\n"
    assert read(head + text + end + done, 1) == "ok"
    assert read(head + text + error + done, 1) == "x"
    for bad in (
        text + done,
        text + end,
        text + error,
        end + error + done,
        end + text + done,
        end + end + done,
        error + error + done,
        error + end + done,
        done + end + done,
        abort_end + done,
        text + end + done + done,
        text + end + done[:-1],
    ):
        with pytest.raises(AssertionError):
            read(head + bad, 1)
