"""The page at ``/``: files as they are, with headers that let them do no more than they should."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources

from starlette.routing import BaseRoute, Route

from twostep.server.errors import ApiError
from twostep.server.http import HttpCall, PlainEndpoint

FILES = {
    "index.html": b"text/html; charset=utf-8",
    "icon.svg": b"image/svg+xml",
    "style.css": b"text/css; charset=utf-8",
    **dict.fromkeys(
        (
            f"js/{name}.js"
            for name in (
                "api",
                "chat",
                "controls",
                "dom",
                "drawings",
                "engine",
                "export",
                "growing",
                "main",
                "markdown",
                "message",
                "requests",
                "store",
            )
        ),
        b"text/javascript; charset=utf-8",
    ),
}
"""{file: content type}; nothing else in this folder is served."""
PATHS = frozenset({"/", *(f"/ui/{name}" for name in FILES)})
"""Need no API key: they hold no data; what they ask the server for does."""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[BaseRoute]:
    """``/`` and ``/ui/...``."""
    index = PlainEndpoint(functools.partial(_serve, "index.html"))
    return [
        Route("/", index, methods=["GET"]),
        Route("/ui/{file:path}", PlainEndpoint(_serve_named), methods=["GET"]),
    ]


async def _serve_named(call: HttpCall) -> None:
    await _serve(call.scope["path_params"]["file"], call)


async def _serve(name: str, call: HttpCall) -> None:
    content_type = FILES.get(name)
    if content_type is None:
        raise ApiError("unknown_url", f"this server has no page /ui/{name[:200]}")
    content, tag = _read(name)
    headers = {**_HEADERS, "ETag": tag}
    if call.header(b"if-none-match") == tag:
        await call.answer(b"", 304, headers)
        return
    await call.answer(content, headers=headers, content_type=content_type)


@functools.cache
def _read(name: str) -> tuple[bytes, str]:
    """A file and its tag; read when first asked for."""
    file = resources.files(__package__).joinpath(*name.split("/"))
    content = file.read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
