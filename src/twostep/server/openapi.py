"""The OpenAPI document, made from the very structs that requests are decoded into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from twostep import __version__
from twostep.server.errors import ErrorResponse
from twostep.server.routes import Operation

_REF = "#/components/schemas/{name}"


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of all operations."""
    kinds: list[Any] = [ErrorResponse]
    for operation in operations:
        for kind in (operation.request, operation.response):
            if kind is not None and kind not in kinds:
                kinds.append(kind)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        for method in operation.methods:
            if method != "HEAD":
                path = operation.path.replace(":path}", "}")
                paths.setdefault(path, {})[method.lower()] = _describe(operation, method, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "twostep", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _describe(operation: Operation, method: str, schema_of: dict[Any, Any]) -> dict[str, Any]:
    name = operation.path.strip("/").replace("/", "_").replace("{", "").replace(":path}", "")
    described: dict[str, Any] = {
        "operationId": f"{method.lower()}_{name}".replace("}", ""),
        "summary": operation.summary,
        "responses": {
            "200": {"description": "success"},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": schema_of[ErrorResponse]}},
            },
        },
    }
    if operation.response is not None:
        content = {"application/json": {"schema": schema_of[operation.response]}}
        if operation.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        described["responses"]["200"]["content"] = content
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[operation.request]}},
        }
    if "{" in operation.path:
        parameter = operation.path.partition("{")[2].partition(":")[0].rstrip("}")
        described["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return described
