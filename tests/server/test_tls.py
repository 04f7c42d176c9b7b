"""HTTPS: --ssl-certfile, --ssl-keyfile, --ssl-ca-certs."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import trustme
from helpers.live_server import LiveServer, live_server

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import serve
from twostep.server.launcher import url_of
from twostep.server.tls import tls_context

REFUSED = "(?i)certificate|alert|unknown ca|eof occurred|reset|closed"
"""In TLS 1.3 a client hears of it when it reads, if the connection is not gone by then."""


class Files:
    """Of one authority: its certificate, a server's and a client's, as PEM files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        authority = trustme.CA()
        server = authority.issue_cert("127.0.0.1", "localhost")
        client = authority.issue_cert("client@example.org")
        self.ca = str(folder / "ca.pem")
        self.cert = str(folder / "cert.pem")
        self.key = str(folder / "key.pem")
        self.both = str(folder / "both.pem")
        self.client = str(folder / "client.pem")
        authority.cert_pem.write_to_path(self.ca)
        server.cert_chain_pems[0].write_to_path(self.cert)
        server.private_key_pem.write_to_path(self.key)
        server.private_key_and_cert_chain_pem.write_to_path(self.both)
        client.private_key_and_cert_chain_pem.write_to_path(self.client)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls") / "one")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of another authority."""
    return Files(tmp_path_factory.mktemp("tls") / "two")


def ask(server: LiveServer, trusted: str, client: str | None = None) -> Any:
    """A chat over HTTPS by a client that checks the server's certificate."""
    context = ssl.create_default_context(cafile=trusted)
    if client is not None:
        context.load_cert_chain(client)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    request = urllib.request.Request(
        f"https://127.0.0.1:{server.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=50, context=context) as response:
        return json.loads(response.read())


@pytest.mark.parametrize("in_one_file", [False, True])
def test_https(files: Files, strangers: Files, in_one_file: bool) -> None:
    context = tls_context(files.both) if in_one_file else tls_context(files.cert, files.key)
    with live_server(tls=context) as server:
        assert ask(server, files.ca)["choices"][0]["message"]["content"] == "Hello there."
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            ask(server, strangers.ca)
        assert url_of(server.sock, context).startswith("https://127.0.0.1:")
        # Plain HTTP gets nothing, and hurts nobody.
        with socket.create_connection(("127.0.0.1", server.port), timeout=50) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"200" not in plain.recv(1000)
        assert ask(server, files.ca)["choices"]


def test_clients_need_a_certificate_of_the_authorities(files: Files, strangers: Files) -> None:
    context = tls_context(files.cert, files.key, files.ca)
    with live_server(tls=context) as server:
        assert ask(server, files.ca, files.client)["choices"]
        for client in (None, strangers.client):
            with pytest.raises(OSError, match=REFUSED):
                ask(server, files.ca, client)


def test_old_protocols_are_refused(files: Files) -> None:
    assert tls_context(files.both).minimum_version >= ssl.TLSVersion.TLSv1_2


def test_mistakes_are_found_before_anything_is_loaded(
    files: Files, strangers: Files, tmp_path: Path
) -> None:
    locked = tmp_path / "locked.pem"
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(Path(files.key).read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for argv, words in (
        (["--ssl-keyfile", files.key], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-ca-certs", files.ca], "--ssl-ca-certs needs --ssl-certfile"),
        (["--ssl-certfile", "no-such.pem"], "cannot read --ssl-certfile no-such.pem"),
        (["--ssl-certfile", files.cert, "--ssl-keyfile", "no"], "cannot read --ssl-keyfile no"),
        (["--ssl-certfile", files.cert, "--ssl-keyfile", strangers.key], "key values mismatch"),
        (["--ssl-certfile", files.cert, "--ssl-keyfile", str(locked)], "has a password"),
        (["--ssl-certfile", str(empty)], f"--ssl-certfile {empty}: "),
        (["--ssl-certfile", files.both, "--ssl-ca-certs", str(empty)], f"certs {empty}: "),
        (["--ssl-certfile", files.both, "--ssl-ca-certs", "no"], "cannot read --ssl-ca-certs no"),
    ):
        with pytest.raises(UsageError) as caught:
            serve.run(["no-such-model.gguf", *argv])
        assert words in str(caught.value)
