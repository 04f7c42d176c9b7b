"""The server's endpoints without a socket: one request in, one response out."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message


async def ask(
    app: ASGIApp, method: str, path: str, body: bytes
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower-case names) and body of what ``app`` answers.

    Cancelling it is what a client's disconnection is on a socket.
    """
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
    }
    sent = False
    never = asyncio.Event()
    status = 0
    headers: dict[str, str] = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await never.wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            for name, value in message.get("headers", ()):
                headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(parts)
