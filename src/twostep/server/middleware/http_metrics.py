"""Counts requests by method, status class and route, whatever answers them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from starlette.routing import BaseRoute, Route, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostep.metrics.http_metrics import HttpMetrics
from twostep.server.http import Push, hooks_of

SKIPPED = frozenset({"/metrics", "/health", "/live", "/ready", "/load", "/ping", "/version"})
"""Asked again and again by machines."""

_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})


class HttpMetricsMiddleware:
    """Labels have few values: routes by their templates, unknown paths and methods by one word."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        routes: Sequence[BaseRoute],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        paths = [route.path for route in routes if isinstance(route, Route)]
        self._exact = frozenset(path for path in paths if "{" not in path)
        self._patterns = [(path, compile_path(path)[0]) for path in paths if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in SKIPPED:
            await self._app(scope, receive, send)
            return
        started = self._clock()
        sender = _Sender(send, hooks_of(scope).get("push"))
        try:
            await self._app(scope, receive, sender)
        finally:
            method = scope["method"]
            self._metrics.observe(
                method if method in _METHODS else "other",
                sender.status or 499,  # nothing was sent: the client had gone
                self._handler(path),
                seconds=self._clock() - started,
                request_bytes=declared_bytes(scope["headers"]),
                response_bytes=sender.num_bytes,
            )

    def _handler(self, path: str) -> str:
        if path in self._exact:
            return path
        for template, pattern in self._patterns:
            if pattern.match(path):
                return template
        return "none"


class _Sender:
    """``send`` that remembers what went through it."""

    __slots__ = ("_push", "_send", "num_bytes", "status")

    def __init__(self, send: Send, push: Push | None) -> None:
        self._send = send
        self._push = push
        self.status: int | None = None
        self.num_bytes = 0

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.num_bytes += len(message.get("body", b""))
        return self._send(message)

    def push(self, data: bytes) -> bool:
        """See HttpCall.push."""
        if self._push is None or not self._push(data):
            return False
        self.num_bytes += len(data)
        return True


def declared_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Of the body, by Content-Length; 0 if that says nothing."""
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 19 else 0
    return 0
