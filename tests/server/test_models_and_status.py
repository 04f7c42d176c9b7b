"""Models, versions and the OpenAPI document."""

from __future__ import annotations

import base64
import hashlib
import re

from helpers.live_server import LiveServer


def test_models(server: LiveServer) -> None:
    document = server.get("/v1/models").json
    assert document["object"] == "list"
    assert [card["id"] for card in document["data"]] == ["tiny", "alias/of-tiny"]
    card = document["data"][0]
    assert card["object"] == "model"
    assert card["max_model_len"] == 256
    assert card["parent"] is None
    assert isinstance(card["created"], int)
    assert card["permission"][0]["object"] == "model_permission"


def test_a_model_whose_name_has_a_slash(server: LiveServer) -> None:
    assert server.get("/v1/models/tiny").json["id"] == "tiny"
    assert server.get("/v1/models/alias/of-tiny").json["id"] == "alias/of-tiny"
    assert server.get("/v1/models/alias%2Fof-tiny").json["id"] == "alias/of-tiny"


def test_status(server: LiveServer) -> None:
    for path in ("/health", "/live", "/ready", "/ping"):
        answer = server.get(path)
        assert (answer.status, answer.body) == (200, b"")
    assert server.send("POST", "/ping").status == 200
    assert set(server.get("/version").json) == {"version"}
    assert server.get("/load").json == {"server_load": 0}
    info = server.get("/server_info").json
    assert info["engine"]["max_model_len"] == 256
    assert info["server"]["max_request_bytes"] == 32 << 20


def test_the_page_of_the_api(server: LiveServer) -> None:
    """It has every path and every object, asks nobody for anything, and its links lead on."""
    answer = server.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    html = answer.body.decode()
    [style] = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"style-src 'sha256-{digest}'" in policy
    assert not re.findall(r"<script|<img|<link|https?://|style=", html)
    document = server.get("/openapi.json").json
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in html
    anchors = re.findall(r"id=([\w-]+)", html)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"href='#([^']+)'", html)) <= set(anchors)
    for name, schema in document["components"]["schemas"].items():
        assert f"object-{name}" in anchors
        for field in schema["properties"]:
            assert f"<code>{field}</code>" in html


def test_openapi_document(server: LiveServer) -> None:
    document = server.get("/openapi.json").json
    assert document["openapi"].startswith("3.1")
    paths = document["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models/{model}"} <= set(paths)
    names = [method["operationId"] for path in paths.values() for method in path.values()]
    assert len(names) == len(set(names))
    schemas = document["components"]["schemas"]
    assert "messages" in schemas["ChatCompletionRequest"]["required"]
    assert "temperature" in schemas["CompletionRequest"]["properties"]

    def check(value: object) -> None:
        """Every reference leads somewhere."""
        if isinstance(value, dict):
            if "$ref" in value:
                name = value["$ref"].removeprefix("#/components/schemas/")
                assert name in schemas
            for each in value.values():
                check(each)
        elif isinstance(value, list):
            for each in value:
                check(each)

    check(document)
    for path in paths.values():
        for method in path.values():
            assert "default" in method["responses"]
