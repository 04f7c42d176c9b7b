"""What must hold of every answer, whatever was asked."""

from __future__ import annotations

import json
import re
from typing import Any

from fuzz.cases import Case
from fuzz.wire import Response

from twostep.server.errors import CODES, ApiError

MAX_ERROR_BYTES = 4096
_LEAKS = re.compile(r"Traceback|site-packages|\b0x[0-9a-f]{6,}|/(?:root|home|usr|tmp|work)/")
_REASONS = {"stop", "length", "tool_calls"}


def problem(case: Case, response: Response | None) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if case.how in ("torn", "hang_up"):
        return None  # nobody reads it; that nothing breaks is seen elsewhere
    if response is None:
        return "the connection was closed without an answer"
    if not response.is_complete:
        return "the answer ended in the middle"
    if response.status >= 500:
        return f"status {response.status}: {response.body[:300]!r}"
    try:
        if response.status >= 400:
            return None if case.method == "HEAD" else _error(response)
        return _success(case, response)
    except (ValueError, KeyError, TypeError, AssertionError, AttributeError) as error:
        return f"status {response.status}: {type(error).__name__} {error}: {response.body[:300]!r}"


def _stream_error(error: dict[str, Any]) -> str | None:
    """What the request itself brought about may end a stream; what is ours may not."""
    is_ours = ApiError(error["code"], "x").status >= 500
    return f"an error in a stream: {error}" if is_ours else None


def _error(response: Response) -> str | None:
    if response.headers["content-type"] != "application/json":
        return f"an error of type {response.headers['content-type']}"
    if len(response.body) > MAX_ERROR_BYTES:
        return f"an error of {len(response.body)} bytes"
    document = json.loads(response.body)
    assert set(document) == {"error"}, "keys"
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}, "keys"
    assert isinstance(error["message"], str), "message"
    assert error["message"], "message"
    assert error["param"] is None or isinstance(error["param"], str), "param"
    assert error["code"] in CODES, f"code {error['code']}"
    wanted = ApiError(error["code"], "x")
    assert (response.status, error["type"]) == (wanted.status, wanted.type), "status or type"
    assert response.status != 405 or response.headers["allow"], "Allow"
    found = _LEAKS.search(error["message"])
    assert not found, f"tells {found and found[0]!r}"
    return None


def _success(case: Case, response: Response) -> str | None:
    if case.method == "HEAD" or response.status != 200:
        assert response.status < 400
        return None
    path = case.path.partition("?")[0]
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return _stream(response)
    if kind == "application/json":
        document = json.loads(response.body, parse_constant=_no_constant)
        if path in ("/v1/chat/completions", "/v1/completions") and case.method == "POST":
            _answer(document)
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _answer(document: dict[str, Any]) -> None:
    choices = document["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices))), "indices"
    assert choices, "no choices"
    assert {choice["finish_reason"] for choice in choices} <= _REASONS, "finish reasons"
    _usage(document["usage"])


def _usage(usage: dict[str, Any]) -> None:
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    assert prompt >= 1, "prompt tokens"
    assert completion >= 0, "completion tokens"
    assert usage["total_tokens"] == prompt + completion, "total tokens"
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < prompt, "cached tokens"


def _stream(response: Response) -> str | None:
    *events, last = [block for block in response.body.decode().split("\n\n") if block]
    assert last == "data: [DONE]", "no [DONE]"
    ends: dict[int, list[str]] = {}
    for event in events:
        if event.startswith(":"):
            continue
        chunk = json.loads(event.removeprefix("data: "), parse_constant=_no_constant)
        if "error" in chunk:
            return _stream_error(chunk["error"])
        for choice in chunk["choices"]:
            found = ends.setdefault(choice["index"], [])
            assert not found, "something after the end of a choice"
            if choice["finish_reason"] is not None:
                found.append(choice["finish_reason"])
        if chunk.get("usage"):
            _usage(chunk["usage"])
    assert sorted(ends) == list(range(len(ends))), "indices"
    assert all(found and found[0] in _REASONS for found in ends.values()), "finish reasons"
    return None
