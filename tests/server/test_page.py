"""The files of the page: all there, nothing else, and bound to this server."""

from __future__ import annotations

import re
from importlib import resources

from helpers.live_server import LiveServer

from twostep.server import page


def test_every_file_is_served_and_listed(server: LiveServer) -> None:
    folder = resources.files(page)
    found = {each.name for each in folder.iterdir() if each.is_file()}
    found |= {f"js/{each.name}" for each in (folder / "js").iterdir()}
    assert {name for name in found if not name.endswith((".py", ".pyc"))} == set(page.FILES)
    for name, content_type in page.FILES.items():
        answer = server.get(f"/ui/{name}")
        assert answer.status == 200
        assert answer.headers["content-type"] == content_type.decode()
        again = server.get(f"/ui/{name}", **{"If-None-Match": answer.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
    assert server.get("/").body == server.get("/ui/index.html").body


def test_nothing_else_is_served(server: LiveServer) -> None:
    for path in ("/ui/__init__.py", "/ui/../__init__.py", "/ui/js/..%2f__init__.py", "/ui/"):
        answer = server.get(path)
        assert (answer.status, answer.error["code"]) == (404, "unknown_url"), path


def test_the_page_asks_nobody_else(server: LiveServer) -> None:
    answer = server.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    for name in page.FILES:
        text = server.get(f"/ui/{name}").body.decode()
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name


def test_every_import_names_a_file(server: LiveServer) -> None:
    for name in page.FILES:
        if name.endswith(".js"):
            for found in re.findall(r'from "\./([\w.]+)"', server.get(f"/ui/{name}").body.decode()):
                assert f"js/{found}" in page.FILES


def test_a_page_can_be_left_out() -> None:
    server = LiveServer(ui=False)
    try:
        assert server.get("/").status == 404
        assert server.get("/ui/style.css").status == 404
    finally:
        server.stop()
