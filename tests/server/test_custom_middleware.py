"""--middleware: layers of the operator's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import live_server

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import serve
from twostep.server.middleware.custom import load_middleware

SOURCE = """
SEEN = []

class Outer:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        SEEN.append(("outer", scope["path"], scope["state"]["request_id"]))
        if scope["path"] == "/broken":
            raise ValueError("a bug of the operator")
        if scope["path"] == "/tea":
            await send({"type": "http.response.start", "status": 418, "headers": []})
            await send({"type": "http.response.body", "body": b"short"})
            return
        async def shout(message):
            if message["type"] == "http.response.body":
                message = {**message, "body": message["body"].upper()}
            await send(message)
        await self.app(scope, receive, shout if "shout" in scope["query_string"].decode() else send)

def inner(app):
    async def layer(scope, receive, send):
        SEEN.append(("inner", scope["path"], scope["state"]["request_id"]))
        await app(scope, receive, send)
    return layer

async def dispatch(request, call_next):
    return await call_next(request)

NUMBER = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "operators_own.py").write_text(SOURCE)
    (tmp_path / "operators_bad.py").write_text("import no_such_module_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("operators_own")
    sys.modules.pop("operators_own", None)


def test_layers_see_every_request_in_their_order(module: Any) -> None:
    args = serve.make_parser().parse(
        ["--middleware", "operators_own.inner", "--middleware=operators_own.Outer"]
    )
    assert serve.server_settings(args, "x").middleware == (
        "operators_own.inner",
        "operators_own.Outer",
    )
    with live_server(middleware=serve.middleware_of(args), api_keys=("k",)) as server:
        answer = server.send("GET", "/v1/models", headers={"X-Request-Id": "me"})
        assert answer.status == 401, "they are outside of the check of keys"
        assert module.SEEN == [("outer", "/v1/models", "me"), ("inner", "/v1/models", "me")]
        broken = server.get("/broken")
        assert (broken.status, broken.error["code"]) == (500, "internal_error")
        tea = server.get("/tea")
        assert (tea.status, tea.body) == (418, b"short")
        assert tea.headers["x-request-id"]
        headers = {"Authorization": "Bearer k"}
        chat = server.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
            **headers,
        )
        assert chat.events[-1] == "[DONE]"
        shouted = server.post(
            "/v1/completions?shout", {"prompt": "Hi", "max_tokens": 8, "stream": True}, **headers
        )
        assert shouted.body.count(b"DATA: ") > 3, "every piece of a stream goes through them"
        assert b"data: " not in shouted.body


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nodots", "write module.name"),
        ("operators_own.Missing", "has no Missing"),
        ("operators_own.NUMBER", "not a class"),
        ("operators_own.dispatch", "write a class of plain ASGI"),
        ("no_such_package_here.x", "cannot be imported"),
        ("operators_bad.x", "no_such_module_at_all"),
        ("..x", "--middleware ..x"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(module: Any, name: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        serve.run(["no-such-model.gguf", "--middleware", name])
    assert words in str(caught.value)
    with pytest.raises(UsageError):
        load_middleware(name)
