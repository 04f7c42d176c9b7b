"""Streams that end before their time, are read slowly, or are silent."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import msgspec
import pytest
from helpers.live_server import LiveServer, live_server

from twostep.server.errors import ApiError
from twostep.server.http import HttpCall
from twostep.server.sse import DONE, KEEP_ALIVE, ChunkTemplate, EventStream, error_event, event

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


def test_b11_a_client_that_goes_ends_its_request(server: LiveServer) -> None:
    server.core.stall_after = 3
    stream = server.open_stream(CHAT, BODY)
    stream.read_until(b'"content":"ll"')
    assert len(server.core.running) == 1
    assert server.get("/load").json == {"server_load": 1}
    stream.close()
    server.wait_until(lambda: not server.core.running)
    assert len(server.core.aborted) == 1
    server.wait_until(lambda: not len(server.state.in_flight))
    server.core.stall_after = None
    assert server.chat().status == 200


def test_b11_a_client_that_goes_while_it_waits_for_a_whole_answer(server: LiveServer) -> None:
    server.core.stall_after = 1
    for n in (1, 3):
        stream = server.open_stream(CHAT, {**BODY, "stream": False, "n": n})
        server.wait_until(lambda most=n: len(server.core.running) == most)  # type: ignore[misc]
        stream.close()
        server.wait_until(lambda: not server.core.running)


def test_a_client_that_goes_from_several_prompts(server: LiveServer) -> None:
    server.core.stall_after = 1
    stream = server.open_stream(COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": True})
    server.wait_until(lambda: len(server.core.running) == 3)
    stream.close()
    server.wait_until(lambda: not server.core.running)


def test_a_storm_of_clients_that_go(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    server.core.reply = lambda request: "x" * 200
    for _ in range(5):
        streams = [server.open_stream(CHAT, {**BODY, "max_tokens": 200}) for _ in range(20)]
        for stream in streams:
            stream.close()
    server.wait_until(lambda: not server.core.running and not len(server.state.in_flight))
    assert server.state.in_flight.queued_reqs == 0
    assert server.state.in_flight.queued_tokens == 0
    assert server.chat().status == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_b52_a_failure_in_the_middle(server: LiveServer, path: str) -> None:
    server.core.fail_after = 5
    body = {**BODY, "prompt": "Hi", "n": 2}
    events = server.post(path, body).events
    assert events[-1] == "[DONE]"
    assert set(events[-2]) == {"error"}
    assert events[-2]["error"]["code"] == "internal_error"
    assert sum("error" in event for event in events[:-1]) == 1
    reasons = [c["finish_reason"] for e in events[:-2] for c in e["choices"]]
    assert set(reasons) <= {None}, "nothing may look finished"
    server.wait_until(lambda: not server.core.running)


def test_an_abort_from_elsewhere_never_looks_finished(server: LiveServer) -> None:
    server.core.stall_after = 2
    stream = server.open_stream(CHAT, BODY)
    stream.read_until(b'"content":"e"')
    engine = server.state.loaded_engine
    assert engine is not None
    server.call(lambda: engine._abort(list(engine._streams)))
    data = stream.read_to_end()
    assert data.count(b'data: {"error"') == 1
    assert data.count(b"[DONE]") == 1
    assert b'"finish_reason":"' not in data
    stream.close()


def test_errors_before_the_first_output_have_a_status(server: LiveServer) -> None:
    server.core.fail_after = 1
    assert server.chat(stream=True).status == 500


def test_a_silent_stream_gets_comments() -> None:
    with live_server(sse_keep_alive_interval=0.05) as server:
        server.core.stall_after = 0
        stream = server.open_stream(CHAT, BODY)
        data = stream.read_until(KEEP_ALIVE)
        assert b" 200 OK" in data
        assert b"data:" not in data
        server.call(server.core.go)
        data = stream.read_to_end()
        assert data.count(b"data: [DONE]") == 1
        stream.close()


def test_a_slow_reader_loses_nothing_and_costs_no_queue(server: LiveServer) -> None:
    """200 tokens with logprobs are more than the socket's buffers; others go on meanwhile."""
    server.core.reply = lambda request: "x" * 200
    body: dict[str, Any] = {**BODY, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
    body["n"] = 8
    stream = server.open_stream(CHAT, body)
    stream.read_until(b"data: ")
    server.wait_until(lambda: not server.core.running)  # the engine does not wait for the client
    assert server.chat(max_tokens=1).status == 200
    data = stream.read_to_end()
    stream.close()
    assert data.count(b"data: [DONE]") == 1
    assert data.count(b'"finish_reason":"length"') == 8
    assert data.count(b'"top_logprobs":[{') == 8 * 200


def test_a_client_that_never_reads_is_hung_up_on() -> None:
    with live_server(stream_stall_timeout=0.2, sse_keep_alive_interval=0) as server:
        server.core.reply = lambda request: "x" * 200
        body = {**BODY, "max_tokens": 200, "logprobs": True, "top_logprobs": 20, "n": 64}
        stream = server.open_stream(CHAT, body)
        server.wait_until(lambda: bool(server.core.requests))
        server.wait_until(lambda: not len(server.state.in_flight))
        with pytest.raises((ConnectionError, AssertionError)):
            stream.read_until(b"data: [DONE]")
        stream.close()
        server.call(server.core.reset)


# -- units ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", '"quotes" \\ \n\t\0', "日本語", "\u2028 </script>"])
def test_a_filled_template_is_the_encoded_chunk(text: str) -> None:
    marker = "\ue000x\ue000"
    template = ChunkTemplate({"id": "a", "choices": [{"text": marker, "n": None}]}, marker)
    data = template.fill(text)
    assert data == event({"id": "a", "choices": [{"text": text, "n": None}]})
    assert data.count(b"\n") == 2, "an event is one line"
    assert json.loads(data.removeprefix(b"data: "))["choices"][0]["text"] == text


def test_an_error_event_is_the_end() -> None:
    data = error_event(ApiError("internal_error", "oh"))
    assert data.endswith(DONE)
    error = msgspec.json.decode(data.partition(b"\n")[0].removeprefix(b"data: "))
    assert error["error"]["message"] == "oh"


class FakeCall(HttpCall):
    """Collects what is sent; ``gate`` holds writers up."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.hung_up = False
        super().__init__({"headers": []}, self._receive, self._send)  # type: ignore[arg-type]

    async def _receive(self) -> Any:
        raise NotImplementedError

    async def _send(self, message: Any) -> None:
        await self.gate.wait()
        self.sent.append(message)

    def hang_up(self) -> bool:
        self.hung_up = True
        self.gate.set()
        return True


def test_stalled_writer_is_hung_up_on_and_a_working_one_is_not() -> None:
    async def main() -> None:
        call = FakeCall()
        events = EventStream(call, keep_alive=0, stall_timeout=0.05)
        await events.write(b"a")
        await asyncio.sleep(0.12)
        assert not call.hung_up, "silence is not the client's fault"
        call.gate.clear()
        await asyncio.wait_for(events.write(b"b"), 10)
        assert call.hung_up
        events.close()

    asyncio.run(main())


def test_no_comment_while_events_flow_or_after_the_end() -> None:
    async def main() -> None:
        call = FakeCall()
        events = EventStream(call, keep_alive=0.2, stall_timeout=0)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            await events.write(b"a")
            await asyncio.sleep(0.01)
        await events.finish(b"z")
        await asyncio.sleep(0.3)
        bodies = [m["body"] for m in call.sent if m["type"] == "http.response.body"]
        assert KEEP_ALIVE not in bodies
        assert bodies[-1] == b"z"
        assert call.sent[-1]["more_body"] is False

    asyncio.run(main())


def test_who_is_gone_costs_no_reading(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose clients left while the loop was busy are dropped with their bodies unread."""
    from twostep.server import http as http_module

    read: list[bytes] = []
    real = http_module.decode_body

    def decode(body: bytes, kind: Any) -> Any:
        read.append(body)
        return real(body, kind)

    monkeypatch.setattr(http_module, "decode_body", decode)
    body = json.dumps({"prompt": "gone", "max_tokens": 5, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    message = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    is_busy, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_busy.set()
        assert go_on.wait(50)

    server.loop.call_soon_threadsafe(hold)
    assert is_busy.wait(50)
    for _ in range(20):
        with server.connect() as sock:
            sock.sendall(message)
    go_on.set()
    assert server.post("/v1/completions", {"prompt": "here", "max_tokens": 1}).status == 200
    assert [json.loads(one)["prompt"] for one in read] == ["here"]
