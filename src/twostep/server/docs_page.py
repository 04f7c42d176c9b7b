"""``/docs``: the OpenAPI document as a page for people. No scripts, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark; }
code { font-family: ui-monospace, monospace; }
h2 { margin-top: 2.5rem; } h3 { margin: 1.5rem 0 0.25rem; }
p { margin: 0.25rem 0; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.15rem 0.75rem 0.15rem 0;
  border-bottom: 1px solid #8884; }
"""


def headers() -> dict[str, str]:
    """What lets a browser do no more with the page than it should."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    return {
        "Content-Security-Policy": (
            f"default-src 'none'; style-src 'sha256-{digest}'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def page(document: Mapping[str, Any]) -> bytes:
    """HTML of an OpenAPI document as ``openapi.document`` makes it."""
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    schemas = document["components"]["schemas"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>",
        "<meta name=viewport content='width=device-width'>",
        f"<style>{_STYLE}</style><body><h1>{escape(title)}</h1>",
        "<p>What this server answers. <a href=openapi.json>openapi.json</a> is the same for "
        "programs.</p>",
        "<h2>Paths</h2>",
    ]
    for path, methods in document["paths"].items():
        parts += [_operation(path, method, found) for method, found in methods.items()]
    parts.append("<h2>Objects</h2>")
    parts += [_schema(name, found) for name, found in schemas.items()]
    return "\n".join(parts).encode()


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    name = f"{method.upper()} {escape(path)}"
    rows = [
        f"<h3 id={escape(operation['operationId'])}><code>{name}</code></h3>",
        f"<p>{escape(operation['summary'])}.</p>",
    ]
    if body := operation.get("requestBody"):
        rows.append(f"<p>Takes {_content(body['content'])}.</p>")
    if content := operation["responses"]["200"].get("content"):
        stream = ", or a stream of events" if "text/event-stream" in content else ""
        rows.append(f"<p>Answers {_content(content)}{stream}.</p>")
    return "\n".join(rows)


def _content(content: Mapping[str, Any]) -> str:
    return _kind(content["application/json"]["schema"])


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    rows = [f"<h3 id={_anchor(name)}><code>{escape(name)}</code></h3>"]
    rows.append(f"<p>{escape(schema.get('description', ''))}</p>")
    required = schema.get("required", ())
    rows.append("<table><tr><th>field<th>type<th>")
    for field, kind in schema.get("properties", {}).items():
        if field in required:
            remark = "required"
        elif kind.get("default") is None:
            remark = ""
        else:
            remark = f"default <code>{escape(str(kind['default']))}</code>"
        rows.append(f"<tr><td><code>{escape(field)}</code><td>{_kind(kind)}<td>{remark}")
    rows.append("</table>")
    return "\n".join(rows)


def _kind(schema: Mapping[str, Any]) -> str:
    """A type in words; null is left out, as it means the same as absent."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"<a href='#{_anchor(name)}'>{escape(name)}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"] if each != {"type": "null"})
    if schema.get("type") == "array":
        items = schema.get("items")
        return f"list of {_kind(items)}" if items else "list"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(each))}</code>" for each in schema["enum"])
    return escape(str(schema.get("type", "anything")))


def _anchor(name: str) -> str:
    return f"object-{escape(name)}"
