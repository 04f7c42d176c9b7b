"""Server-sent events: the writer of a stream, and chunks that are mostly made in advance."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from twostep.server.errors import ApiError
from twostep.server.http import HttpCall

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """Any JSON value as an event."""
    return b"data: " + _encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The end of a stream that failed: an error, and nothing that looks like success."""
    return b"data: " + error.body() + b"\n\n" + DONE


class ChunkTemplate:
    """A chunk that is the same but for one text: what stands before and behind it, encoded once."""

    def __init__(self, chunk: Any, marker: str) -> None:
        """``chunk`` as a JSON value in which ``marker`` stands for the text."""
        before, found, behind = event(chunk).partition(_encode(marker))
        assert found, "the marker does not occur in the chunk"
        self._before = before
        self._behind = behind

    def fill(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + _encode(text) + self._behind


class EventStream:
    """Writes one stream. Opens with the first write, so that errors before it have a status.

    A timer that touches nothing while events flow sends a comment when nothing was written for
    ``keep_alive`` seconds (opening the stream, if the first event takes that long), and hangs up
    on a client that has not read for ``stall_timeout`` seconds.
    """

    def __init__(self, call: HttpCall, *, keep_alive: float, stall_timeout: float) -> None:
        self._call = call
        self._push = call.push
        self._keep_alive = keep_alive
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        """When something was last written, or is being written since."""
        self._writing = 0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self.is_open = False
        """Whether the status has been sent."""
        self._is_ending = False
        self._arm()

    def push(self, data: bytes) -> bool:
        """Send events at once; False, and nothing is sent, if that needs ``write``."""
        if self._push is None or self._writing or not self.is_open or not self._push(data):
            return False
        self._last = self._loop.time()
        return True

    async def write(self, data: bytes) -> None:
        """Send events; waits while the client's buffers are full."""
        await self._send(data, more=True)

    async def finish(self, data: bytes) -> None:
        """Send the last events."""
        self._is_ending = True
        await self._send(data, more=False)
        self.close()

    def close(self) -> None:
        """Stop the timer. Safe to call twice."""
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()

    async def _send(self, data: bytes, *, more: bool) -> None:
        self._last = self._loop.time()
        self._writing += 1
        try:
            if not self.is_open:
                self.is_open = True
                await self._call.open(200, _HEADERS, data, more=more)
                return
            await self._call.send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._writing -= 1

    def _arm(self) -> None:
        waits = [seconds for seconds in (self._keep_alive, self._stall_timeout) if seconds > 0]
        if waits:
            self._timer = self._loop.call_later(min(waits), self._check)

    def _check(self) -> None:
        silent = self._loop.time() - self._last
        if self._writing:
            if 0 < self._stall_timeout <= silent:
                self._call.hang_up()
                return
        elif self._is_ending:
            return
        elif 0 < self._keep_alive <= silent + 1e-3:
            self._comment = self._loop.create_task(self._send(KEEP_ALIVE, more=True))
        self._arm()
