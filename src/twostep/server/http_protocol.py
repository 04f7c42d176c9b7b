"""uvicorn's HTTP/1.1 protocol with what it lacks: bounded headers, deadlines, hanging up."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from twostep.server.errors import ApiError, overloaded
from twostep.server.http import EXTENSION
from twostep.server.load_shedder import LoadShedder


class _Joining:
    """A transport that writes in one piece what it is given while it is held back.

    A packet costs a system call and wakes up the client, which on the same machine takes the core
    from us.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def hold_back(self, on: bool) -> None:
        """Keep what is written, until switched off."""
        held, self._held = self._held, [] if on else None
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.hold_back(False)
        self._transport.close()


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    max_header_bytes = 64 << 10
    max_headers = 256
    max_connections = 4096
    shedder: LoadShedder | None = None
    """Answers before the app where it can."""
    receive_timeout = 30.0
    """Seconds without a byte while a request is expected to go on."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._header_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._expects_bytes = True
        """Whether a request has begun, or must begin, and is not complete."""
        self._lost = False
        self._is_shed = False
        """Whether the request is answered, and the rest of it of no interest."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a connection that says nothing is closed."""
        joining = _Joining(transport)
        super().connection_made(cast(asyncio.Transport, joining))  # it passes the rest on
        self._hold_back = joining.hold_back
        if len(self.connections) > self.max_connections:
            error = overloaded(f"{self.max_connections} connections are open already; come again")
            self._end_with(error.status, error)
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._disarm()
        self._lost = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self.transport.is_closing():
            return
        self._disarm()
        super().data_received(data)
        if self._expects_bytes and not self.transport.is_closing():
            self._arm()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._expects_bytes = True
        self._header_bytes = 0
        hooks: dict[object, object] = {
            "abort": self.transport.abort,
            "is_gone": self._is_lost,
            "hold_back": self._hold_back,
            "push": self._push,
        }
        self.scope["extensions"] = {EXTENSION: hooks}

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count_header_bytes(len(name) + len(value) + 4)
        if len(self.headers) >= self.max_headers:
            self._refuse_headers()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are here; the body may follow."""
        shedder = self.shedder
        limit = shedder.limit() if shedder is not None else None
        if shedder is not None and limit is not None and self._may_answer_at_once():
            defaults = self.server_state.default_headers
            answer = shedder.answer(limit, self.url, self.headers, defaults)
            if answer is not None:
                self._is_shed = True
                self.transport.write(answer)
                return
        super().on_headers_complete()

    def _may_answer_at_once(self) -> bool:
        """Whether it is a plain POST on a connection that owes nothing else and goes on."""
        parser, cycle = self.parser, self.cycle
        return (
            parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and (cycle is None or cycle.response_complete)
            and not self.flow.write_paused  # a client that does not read waits for its turn
        )

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if not self._is_shed:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is complete; uvicorn's keep-alive timer waits for the next one."""
        self._expects_bytes = False
        if self._is_shed:
            self._is_shed = False
            self.on_response_complete()
            return
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What does not parse as HTTP."""
        if not self.transport.is_closing():
            self._end_with(400, ApiError("invalid_value", "this is not a valid HTTP request"))

    def _push(self, data: bytes) -> bool:
        """Send a piece of a chunked body without waiting, or not at all (False)."""
        # With another request in the pipeline, ``cycle`` is that one's; no bytes would be the end.
        may_push = self.cycle.chunked_encoding and not self.pipeline and data
        if not may_push or self.flow.write_paused or self._lost:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _is_lost(self) -> bool:
        return self._lost

    def _count_header_bytes(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes > self.max_header_bytes:
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        error = ApiError(
            "header_too_large",
            f"the headers have more than {self.max_header_bytes} bytes or {self.max_headers} lines",
        )
        self._end_with(error.status, error)
        raise ValueError("headers too large")  # the parser stops and reports an invalid request

    def _end_with(self, status: int, error: ApiError) -> None:
        body = error.body()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.receive_timeout, self._give_up)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if not self.transport.is_closing() and not self.flow.read_paused:
            self.transport.close()
