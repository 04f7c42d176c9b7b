"""The ASGI application: routes behind layers of plain ASGI."""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from twostep.server import docs_page, live, openapi, page
from twostep.server.http import HttpCall, PlainEndpoint
from twostep.server.load_shedder import LoadShedder
from twostep.server.middleware.api_key import OPEN_PATHS, ApiKeyCheck
from twostep.server.middleware.boundary import Boundary
from twostep.server.middleware.custom import Middleware, wrap
from twostep.server.middleware.host_check import HostCheck
from twostep.server.middleware.http_metrics import HttpMetricsMiddleware
from twostep.server.routes import operations
from twostep.server.state import ServerState

LOOPBACK_NAMES = ("localhost",)


def build_app(
    state: ServerState,
    *,
    middleware: Sequence[Middleware] = (),
    extra_routes: Sequence[BaseRoute] = (),
    extra_open_paths: Sequence[str] = (),
) -> ASGIApp:
    """The whole server as one ASGI app. It answers before ``state`` is ready.

    ``middleware`` are the operator's own layers: they see every request, with its id, before its
    key is checked, and what they raise is answered. ``extra_routes`` are other parts' (metrics,
    pages); ``extra_open_paths`` those of them that need no key.
    """
    settings = state.settings
    table = operations(state)
    routes: list[BaseRoute] = [
        Route(operation.path, operation.app, methods=operation.methods) for operation in table
    ]
    routes += _description(openapi.document(table))
    scrape = PlainEndpoint(state.observability.answer_metrics)
    routes.append(Route("/metrics", scrape, methods=["GET"]))
    watch = PlainEndpoint(functools.partial(live.engine_events, state))
    routes.append(Route("/engine/events", watch, methods=["GET"]))
    if settings.ui:
        routes.extend(page.page_routes())
    routes.extend(extra_routes)
    app: ASGIApp = Router(routes, redirect_slashes=False)
    if settings.api_keys:
        app = ApiKeyCheck(
            app, settings.api_keys, OPEN_PATHS | page.PATHS | frozenset(extra_open_paths)
        )
    if settings.allowed_hosts is not None:
        app = HostCheck(app, settings.allowed_hosts)
    app = wrap(app, middleware)
    app = Boundary(app, log_access=not settings.disable_access_log)
    app = HttpMetricsMiddleware(app, state.observability.http, routes)
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


def build_shedder(state: ServerState, middleware: Sequence[Middleware] = ()) -> LoadShedder | None:
    """What answers in the app's place while the queue is full; layers of the operator's own see
    every request, so with them there is none."""
    if middleware:
        return None
    settings, checks = state.settings, []
    if settings.api_keys:
        checks.append(ApiKeyCheck(_nowhere, settings.api_keys, OPEN_PATHS).accepts)
    if settings.allowed_hosts is not None:
        checks.append(HostCheck(_nowhere, settings.allowed_hosts).accepts)
    paths = [operation.path for operation in operations(state) if operation.waits]
    return LoadShedder(state, paths, checks)


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    """The app behind a check that is only asked."""


def _description(document: dict[str, Any]) -> list[BaseRoute]:
    """``/openapi.json`` and ``/docs``."""
    encoded = msgspec.json.encode(document)
    shown, headers = docs_page.page(document), docs_page.headers()

    async def answer_document(call: HttpCall) -> None:
        await call.answer(encoded)

    async def answer_page(call: HttpCall) -> None:
        html = b"text/html; charset=utf-8"
        await call.answer(shown, headers=headers, content_type=html)

    return [
        Route("/openapi.json", PlainEndpoint(answer_document), methods=["GET"]),
        Route("/docs", PlainEndpoint(answer_page), methods=["GET"]),
    ]


def loopback_hosts() -> tuple[str, ...]:
    """Names under which this machine may be called."""
    return (*LOOPBACK_NAMES, socket.gethostname())
