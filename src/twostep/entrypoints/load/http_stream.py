"""A client that knows when each byte of an answer arrived.

Arrival is noted where the event loop hands the bytes over, so that the load generator's own work
does not show up as the server's latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools

from twostep.contracts.errors import UsageError


class ConnectionLostError(Exception):
    """The server closed the connection in the middle of an answer."""


ChunkReader = Callable[[float, bytes], bool]
"""Called with (arrival in seconds of ``time.perf_counter``, bytes of the body), says whether it
wants more; must not raise."""


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; carries one exchange at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.is_open = False
        self.has_answered = False
        """Whether any byte of the current answer has come."""
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._arrived: deque[tuple[float, bytes]] = deque()
        self._complete = True
        self._keep_alive = True
        self._news = asyncio.Event()
        self._reader: ChunkReader | None = None
        """Told of the body's pieces when they arrive, in place of a task that waits for each."""
        self._now = 0.0

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self.has_answered = True
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._reader is None or self._complete or not self.is_open:
            self._news.set()  # who reads piece by piece is woken for the end alone

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._news.set()

    # the parser calls these

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            if not self._reader(self._now, body):
                self._reader = None
        else:
            self._arrived.append((self._now, body))

    def on_message_complete(self) -> None:
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()

    # the pool and the reader call these

    def send(self, message: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._arrived.clear()
        self._reader = None
        self._complete = False
        self.has_answered = False
        self.status = 0
        self.transport.write(message)

    async def headers(self) -> int:
        """The status code, as soon as it is known."""
        while not self.status:
            await self._wait()
        return self.status

    async def tell(self, reader: ChunkReader) -> None:
        """See Response."""
        while self._arrived:
            if not reader(*self._arrived.popleft()):
                return
        self._reader = reader
        while self._reader is not None and not self._complete:
            await self._wait()

    async def _wait(self) -> None:
        if not self.is_open:
            raise ConnectionLostError("the server closed the connection")
        self._news.clear()
        await self._news.wait()

    @property
    def is_reusable(self) -> bool:
        return self.is_open and self._complete and self._keep_alive

    def close(self) -> None:
        self.is_open = False
        self.transport.close()


class Response:
    """An answer that is still arriving. A context manager: it gives the connection back."""

    def __init__(self, pool: HttpPool, connection: _Connection, status: int) -> None:
        self.status = status
        self._pool = pool
        self._connection = connection

    async def tell(self, reader: ChunkReader) -> None:
        """Call ``reader`` with each piece of the body when it arrives, while it wants more.

        No task is woken for a chunk: a third less work. Raises ConnectionLostError.
        """
        await self._connection.tell(reader)

    async def read(self) -> bytes:
        """All of the body."""
        parts: list[bytes] = []

        def take(arrived: float, data: bytes) -> bool:
            parts.append(data)
            return True

        await self.tell(take)
        return b"".join(parts)

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool._give_back(self._connection)


class HttpPool:
    """Connections to one server, reused."""

    def __init__(self, base_url: str, *, insecure: bool = False) -> None:
        """``base_url``: ``http://host:port``; a path in it is put before every path."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--base-url {base_url!r} is not http://HOST[:PORT]")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if insecure:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Response:
        """Send a request; returns when the status is known.

        Raises OSError if the server cannot be reached, ConnectionLostError if it hangs up.
        """
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"Host: {self._host}:{self._port}"]
        fields = {"Accept": "*/*", **(headers or {})}
        if body:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines += [f"{name}: {value}" for name, value in fields.items()]
        message = "\r\n".join([*lines, "", ""]).encode() + body
        # A server may hang up on an idle connection just as it is used again (RFC 9112, 9.3.1):
        # then nothing has come back, and a new one is tried.
        while (idle := self._take_idle()) is not None:
            with contextlib.suppress(ConnectionLostError):
                return await self._exchange(idle, message)
            if idle.has_answered:
                raise ConnectionLostError("the server closed the connection")
        return await self._exchange(await self._connect(), message)

    async def _exchange(self, connection: _Connection, message: bytes) -> Response:
        try:
            connection.send(message)
            return Response(self, connection, await connection.headers())
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._tls
        )
        return connection

    def _give_back(self, connection: _Connection) -> None:
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
