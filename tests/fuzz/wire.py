"""A keep-alive connection that sends whatever bytes it is given and reads what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import httptools
from fuzz.cases import Case


@dataclasses.dataclass
class Response:
    """A whole answer."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False


class _Reader:
    """httptools' callbacks."""

    def __init__(self, *, has_body: bool) -> None:
        self.response = Response()
        self._has_body = has_body
        self._parts: list[bytes] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.response.headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.response.status = self.parser.get_status_code()
        if not self._has_body:
            self.response.is_complete = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self.response.status == 100:  # "go on": the answer follows
            self.response.status = 0
            self.response.headers.clear()
            return
        self.response.body = b"".join(self._parts)
        self.response.is_complete = True


class Connection:
    """Reused from case to case while both sides leave it open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, case: Case) -> Response | None:
        """Send a case and read its answer; None if there need not be one."""
        fresh = self._streams is None
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        try:
            writer.write(case.encode())
            if case.how == "torn":
                # A length that lies makes the rest of a body the next request, and no HTTP: the
                # server answers 400 and closes while we still send.
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                self.close()
                return None
            response = await self._read(reader, case)
        except BaseException:
            self.close()
            raise
        if response is None and not fresh:
            # The server closed an idle connection while the request was on its way.
            self.close()
            return await self.exchange(case)
        if (
            case.how == "hang_up"
            or case.method == "HEAD"
            or response is None
            or not response.is_complete
            or response.headers.get("connection", "").lower() == "close"
        ):
            self.close()
        return response

    async def _read(self, reader: asyncio.StreamReader, case: Case) -> Response | None:
        told = _Reader(has_body=case.method != "HEAD")
        is_first = True
        while not told.response.is_complete:
            data = await reader.read(1 << 16)
            if not data:
                return None if is_first else told.response
            is_first = False
            if case.how == "hang_up":
                return None
            told.parser.feed_data(data)
        return told.response

    def close(self) -> None:
        """Forget the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
