"""The Host header of a server on loopback: pages of other sites must not reach it by a name that
they let point here (DNS rebinding)."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from twostep.server.errors import ApiError, shown
from twostep.server.http import header_of


class HostCheck:
    """Refuses names that are neither listed nor an address."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and not self.accepts(scope["headers"]):
            given = header_of(scope["headers"], b"host") or ""
            raise ApiError(
                "invalid_host",
                f"this server listens on loopback only and is not called {shown(given)!r}; "
                "--host 0.0.0.0 lets others in",
            )
        await self._app(scope, receive, send)

    def accepts(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request names no host, or one that is allowed."""
        given = header_of(headers, b"host")
        return not given or self._is_allowed(host_name(given))

    def _is_allowed(self, name: str) -> bool:
        return name in self._hosts or name.endswith(".localhost") or _is_address(name)


def host_name(header: str) -> str:
    """The name in a Host header, without its port, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].rstrip(".").lower()


@functools.lru_cache(64)  # the same few names in every request
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
