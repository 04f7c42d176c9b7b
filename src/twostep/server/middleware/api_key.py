"""API keys: with one set, every path needs it but for a short list."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from twostep.server.errors import ApiError
from twostep.server.http import header_of, route_path

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics", "/version"})
"""Paths that anybody may ask."""


class ApiKeyCheck:
    """Lets requests through that carry a key, as a bearer token or as ``x-api-key``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_closed = scope["type"] == "http" and route_path(scope) not in self._open_paths
        if is_closed and not self.accepts(scope["headers"]):
            raise ApiError(
                "invalid_api_key",
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)

    def accepts(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request carries a key."""
        scheme, _, token = (header_of(headers, b"authorization") or "").partition(" ")
        given = [token.strip()] if scheme.lower() == "bearer" else []
        given.append(header_of(headers, b"x-api-key") or "")
        matches = False
        for key in given:
            digest = _digest(key)
            for known in self._digests:  # all of them, so that time tells nothing
                matches |= bool(key) and hmac.compare_digest(digest, known)
        return matches


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
