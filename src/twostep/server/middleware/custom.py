"""``--middleware``: layers of the operator's own around the server."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import ASGIApp

from twostep.contracts.errors import UsageError

Middleware = Callable[[ASGIApp], ASGIApp]
"""A class of plain ASGI middleware, or a function that makes one."""


def load_middleware(name: str) -> Middleware:
    """What ``module.name`` stands for. Raises UsageError if there is none, or it is none."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute:
        raise UsageError(f"--middleware {name}: write module.name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a foreign module does while it is imported
        raise UsageError(
            f"--middleware {name}: {module_name} cannot be imported: "
            f"{type(error).__name__}: {error} (is its folder in PYTHONPATH?)"
        ) from error
    found: Any = getattr(module, attribute, None)
    if found is None:
        raise UsageError(f"--middleware {name}: {module_name} has no {attribute}")
    if inspect.iscoroutinefunction(found):
        raise UsageError(
            f"--middleware {name}: a function of (request, call_next) would hold up every chunk of "
            "a stream; write a class of plain ASGI: __init__(self, app), "
            "async __call__(self, scope, receive, send)"
        )
    if not callable(found):
        raise UsageError(f"--middleware {name}: not a class, but {type(found).__name__}")
    middleware: Middleware = found  # who writes one answers for its signature
    return middleware


def wrap(app: ASGIApp, middleware: Sequence[Middleware]) -> ASGIApp:
    """The app in all layers; the last one is the outermost, as vLLM has it."""
    for layer in middleware:
        app = layer(app)
    return app
