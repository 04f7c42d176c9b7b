"""``/engine/events``: what a page that looks at the engine gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.live_server import LiveServer

from twostep.contracts.live_view import LaneSpan, LiveUpdate, PlannedRequest, PlanView, RequestEvent

UPDATE = LiveUpdate(
    time=1.5,
    token_budget=16,
    max_num_seqs=4,
    plans=[
        PlanView(
            step_id=7, time=1.4, num_tokens=5, num_requests=1, num_new_blocks=2, preempted=[],
            planned=[PlannedRequest("r", 5, 0, "new")],
        )
    ],
    spans=[LaneSpan(7, "device", "forward", 1.41, 1.42)],
    events=[RequestEvent(1.3, "r", "arrived", 5)],
    running=["r"],
    waiting=[],
    num_waiting=0,
    kv_cache_usage=0.25,
    prefix_cache_queries=5,
    prefix_cache_hits=0,
    num_preemptions=0,
)  # fmt: skip


class Watcher:
    """A GET whose events are read one by one."""

    def __init__(self, server: LiveServer) -> None:
        self.sock = server.connect()
        self.sock.sendall(b"GET /engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.received = b""

    def next_event(self) -> Any:
        while b"data: " not in self.received or b"\n\n" not in self.received.split(b"data: ")[1]:
            piece = self.sock.recv(65536)
            assert piece, self.received
            self.received += piece
        text, _, self.received = self.received.partition(b"data: ")[2].partition(b"\n\n")
        return json.loads(text)


def test_updates_come_as_they_are_made(server: LiveServer) -> None:
    watcher = Watcher(server)
    server.wait_until(lambda: server.core.is_watched)
    for _ in range(3):
        server.call(lambda: server.core.show(UPDATE))
        shown = watcher.next_event()
        assert shown["plans"][0]["planned"] == [["r", 5, 0, "new"]]
        assert shown["spans"] == [[7, "device", "forward", 1.41, 1.42]]
        assert shown["events"] == [[1.3, "r", "arrived", 5]]
    watcher.sock.close()
    server.wait_until(lambda: not server.core.is_watched)


def test_the_end_of_the_engine_is_an_error() -> None:
    server = LiveServer(max_core_restarts=0)
    watcher = Watcher(server)
    server.wait_until(lambda: server.core.is_watched)
    server.call(server.core.die)
    assert watcher.next_event()["error"]["code"] == "engine_dead"
    watcher.sock.close()
    server.join()


def test_not_before_it_is_loaded() -> None:
    server = LiveServer(load_at_once=False)
    try:
        answer = server.get("/engine/events")
        assert (answer.status, answer.error["code"]) == (503, "loading")
        server.finish_loading()
    finally:
        server.stop()


@pytest.mark.parametrize("path", ["/engine/events", "/v1/models"])
def test_data_needs_the_key(path: str) -> None:
    server = LiveServer(api_keys=("secret",))
    try:
        assert server.get(path).status == 401
        assert server.get("/").status == 200
        assert server.get("/ui/js/main.js").status == 200
    finally:
        server.stop()
