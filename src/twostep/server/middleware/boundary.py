"""The outermost layer of every request: its id, its errors, its line in the access log."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostep.server.errors import ApiError, from_exception, is_ours
from twostep.server.http import ClientGone, HttpCall, Push, route_path
from twostep.server.request_fields import REQUEST_ID

logger = logging.getLogger("twostep.server")
access_logger = logging.getLogger("twostep.server.access")

PROBES = frozenset({"/health", "/live", "/ready", "/ping", "/metrics", "/load"})
"""Asked again and again by machines: not logged."""


class Boundary:
    """Gives each request an id, turns whatever is raised into an answer, and logs it."""

    def __init__(self, app: ASGIApp, *, log_access: bool) -> None:
        self._app = app
        self._log_access = log_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        sender = _Sender(send, request_id_of(scope["headers"]))
        scope.setdefault("state", {})["request_id"] = sender.request_id
        scope["app"] = self  # with it, the router raises what it would otherwise answer itself
        try:
            await self._app(scope, receive, sender)
        except ClientGone:
            sender.status = sender.status or 499
        except Exception as error:
            await self._answer(HttpCall(scope, receive, sender), sender, error)
        if self._log_access and route_path(scope) not in PROBES:
            status, ended = sender.status or 0, time.monotonic()
            log_access(scope["method"], scope["path"], status, started, ended, sender.request_id)

    async def _answer(self, call: HttpCall, sender: _Sender, error: Exception) -> None:
        if isinstance(error, HTTPException):
            error = _router_error(error)
        api_error = from_exception(error)
        if is_ours(error):
            logger.error("request %s failed", sender.request_id, exc_info=error)
        if sender.status is None:
            await call.answer_error(api_error)
        elif not call.hang_up():  # half an answer must not look like a whole one
            raise error


def log_access(
    method: str, path: str, status: int, started: float, ended: float, request_id: str
) -> None:
    """The request's line in the access log; times in seconds of one clock."""
    access_logger.info(
        "%s %s %d %.1f ms %s",
        method,
        path[:200].encode("ascii", "backslashreplace").decode(),
        status,
        1000 * (ended - started),
        request_id,
    )


class _Sender:
    """``send`` that puts the id into the headers and remembers the status."""

    __slots__ = ("_send", "push", "request_id", "status")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.push: Push | None = getattr(send, "push", None)
        self.request_id = request_id
        self.status: int | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        if self.status is None and message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            message = {**message, "headers": headers}
        return self._send(message)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's X-Request-Id, or one made for it."""
    for name, value in headers:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if REQUEST_ID.fullmatch(text):
                return text
            break
    return secrets.token_hex(16)


def _router_error(error: HTTPException) -> ApiError:
    """What the router raises: no such path, or not with this method."""
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return ApiError(
            "method_not_allowed",
            f"this path takes {allowed}; use that method",
            headers={"Allow": allowed},
        )
    return ApiError("unknown_url", "there is nothing at this path; see /openapi.json")
