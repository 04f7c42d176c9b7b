"""One HTTP exchange: headers, body, answer. Plain ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from twostep.server.decode import decode_body
from twostep.server.errors import ApiError

T = TypeVar("T")

JSON = b"application/json"
Push = Callable[[bytes], bool]
"""See ``HttpCall.push``."""
EXTENSION = "twostep"
"""The ASGI extension with the hooks of ``http_protocol.HttpProtocol``."""
LOOKS = 3
"""Turns of the loop until the end of a connection that lay in its socket is heard, and one more."""


def hooks_of(scope: Scope) -> Mapping[str, Callable[..., Any]]:
    """What our protocol lends beside ASGI; empty under another server."""
    extensions = scope.get("extensions", {})
    hooks: Mapping[str, Callable[..., Any]] = extensions.get(EXTENSION, {})
    return hooks


class ClientGone(Exception):
    """The client closed the connection: nobody waits for an answer."""


def route_path(scope: Scope) -> str:
    """The path without the prefix under which a proxy shows the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def header_of(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """The first header of this (lower-case) name."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


class HttpCall:
    """A request and the way back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send

    @property
    def request_id(self) -> str:
        """The client's X-Request-Id, or one made for it."""
        request_id: str = self.scope["state"]["request_id"]
        return request_id

    def header(self, name: bytes) -> str | None:
        """The first header of this (lower-case) name."""
        return header_of(self.scope["headers"], name)

    def hang_up(self) -> bool:
        """Close the connection without waiting for the client; False if the server cannot."""
        abort = hooks_of(self.scope).get("abort")
        if abort is not None:
            abort()
        return abort is not None

    @property
    def push(self) -> Push | None:
        """Sends a piece of a stream at once and returns True, or does nothing and returns False.

        Less work than ``send``, which is for pieces that have to wait. None if a layer of the
        operator's, or another server, wants to see what is sent.
        """
        push: Push | None = getattr(self.send, "push", None)
        return push

    async def check_client(self) -> None:
        """Raise ClientGone if the client has closed the connection, as far as the server hears.

        The loop looks at its sockets first. A thousand who open and cut would else be a second of
        work: they are told apart before their bodies are read.
        """
        is_gone = hooks_of(self.scope).get("is_gone")
        if is_gone is None:
            return
        for _ in range(LOOKS):
            await asyncio.sleep(0)
            if is_gone():
                raise ClientGone

    async def read_body(self, limit: int) -> bytes:
        """The whole body. Raises ApiError (request_too_large) or ClientGone."""
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def open(
        self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, *, more: bool
    ) -> None:
        """Send the head and the first bytes of the body, together."""
        hold_back = hooks_of(self.scope).get("hold_back", _nothing)
        hold_back(True)
        try:
            await self.send({"type": "http.response.start", "status": status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body, "more_body": more})
        finally:
            hold_back(False)

    async def answer(
        self,
        body: bytes,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        content_type: bytes = JSON,
    ) -> None:
        """Send a whole response."""
        fields = [(b"content-length", str(len(body)).encode())]
        if body:
            fields.append((b"content-type", content_type))
        for name, value in (headers or {}).items():
            fields.append((name.lower().encode("latin-1"), value.encode("latin-1", "replace")))
        await self.open(status, fields, body, more=False)

    async def answer_json(self, value: Any, status: int = 200) -> None:
        """Send a struct, list or mapping."""
        await self.answer(msgspec.json.encode(value), status)

    async def answer_error(self, error: ApiError) -> None:
        """Send an error."""
        await self.answer(error.body(), error.status, error.headers)


def _nothing(on: bool) -> None:
    """A server without this hook."""


def _too_large(limit: int) -> ApiError:
    # Whatever else the client sends is not read: the connection ends.
    return ApiError(
        "request_too_large",
        f"the request body has more than {limit} bytes (--max-request-bytes); send less",
        headers={"Connection": "close"},
    )


Handler = Callable[[HttpCall, T], Awaitable[None]]


class JsonEndpoint(Generic[T]):
    """An ASGI app: a JSON body in, whatever ``handle`` sends out.

    ``check_room`` raises for those who would be turned away whatever they ask: in a crowd they must
    cost next to nothing, so nobody reads what they sent.
    """

    def __init__(
        self,
        kind: type[T],
        handle: Handler[T],
        max_bytes: int,
        check_room: Callable[[], None] | None = None,
    ) -> None:
        self.kind = kind
        self._handle = handle
        self._max_bytes = max_bytes
        self._check_room = check_room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._check_room is not None:
            self._check_room()
        call = HttpCall(scope, receive, send)
        await call.check_client()
        _check_content_type(call)
        body = await call.read_body(self._max_bytes)
        await self._handle(call, decode_body(body, self.kind))


class PlainEndpoint:
    """An ASGI app for requests whose body, if any, does not matter."""

    def __init__(self, handle: Callable[[HttpCall], Awaitable[None]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._handle(HttpCall(scope, receive, send))


def _check_content_type(call: HttpCall) -> None:
    """Only JSON: a page of another site can send anything else without asking."""
    given = (call.header(b"content-type") or "").partition(";")[0].strip().lower()
    if given != "application/json" and not (
        given.startswith("application/") and given.endswith("+json")
    ):
        raise ApiError(
            "unsupported_media_type",
            f"the content type is {given[:100] or 'not given'}; "
            "send Content-Type: application/json",
        )
