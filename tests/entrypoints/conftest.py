"""A store of its own for every test, a fake engine, and a Hub on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.results import CompletionOutput, Logprob, RequestOutput


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No test sees the user's models, cache or settings, nor the real network."""
    home = tmp_path / "home"
    for name in ("TWOSTEP_OFFLINE", "TWOSTEP_DEBUG", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TWOSTEP_HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setenv("NO_PROXY", "*")
    return home


class FakeEngine:
    """Answers with fixed pieces of text and remembers what it was asked."""

    def __init__(self, path: str, pieces: list[str], finish_reason: str, **options: Any) -> None:
        self.path = path
        self.options = options
        self.pieces = pieces
        self.finish_reason = finish_reason
        self.asked: list[Any] = []
        self.params: list[Any] = []
        self.streams: list[Any] = []  # kept alive, so that only close() can end them
        self.aborted = 0
        self.closed = False

    def _stream(self, prompt: Any, params: Any) -> Iterator[RequestOutput]:
        self.asked.append(prompt)
        self.params.append(params)
        is_last = False
        try:
            for index, piece in enumerate(self.pieces):
                is_last = index == len(self.pieces) - 1
                reason = self.finish_reason if is_last else None
                yield RequestOutput(
                    request_id="0",
                    prompt=None,
                    prompt_token_ids=[1, 2, 3],
                    outputs=[
                        CompletionOutput(
                            index=0, text=piece, token_ids=[10 + index], finish_reason=reason
                        )
                    ],
                    finished=is_last,
                    num_cached_tokens=2,
                )
        finally:
            self.aborted += not is_last

    def stream(self, prompt: Any, sampling_params: Any) -> Iterator[RequestOutput]:
        self.streams.append(self._stream(prompt, sampling_params))
        return self.streams[-1]

    def stream_chat(self, messages: Any, sampling_params: Any) -> Iterator[RequestOutput]:
        return self.stream(messages, sampling_params)

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        self.asked.append(prompts)
        self.params.append(sampling_params)
        count = len(self.pieces)
        logprobs = None
        if sampling_params.logprobs is not None:
            logprobs = [
                {
                    10 + i: Logprob(logprob=-0.5, rank=1, decoded_token=self.pieces[i]),
                    99: Logprob(logprob=float("-inf"), rank=2, decoded_token="x"),
                }
                for i in range(count)
            ]
        return [
            RequestOutput(
                request_id=str(i),
                prompt=prompt,
                prompt_token_ids=[1, 2, 3],
                outputs=[
                    CompletionOutput(
                        index=index,
                        text="".join(self.pieces),
                        token_ids=list(range(10, 10 + count)),
                        cumulative_logprob=None if logprobs is None else -0.5 * count,
                        logprobs=logprobs,
                        finish_reason=self.finish_reason,
                    )
                    for index in range(sampling_params.n)
                ],
                finished=True,
            )
            for i, prompt in enumerate(prompts)
        ]

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FakeFactory:
    """Stands for ``LLM``; keeps the engines it made."""

    def __init__(self) -> None:
        self.pieces = ["The capital", " is", " Paris."]
        self.finish_reason = "stop"
        self.made: list[FakeEngine] = []

    def __call__(self, path: str, *, progress: Any, **options: Any) -> FakeEngine:
        progress("weights", 0.5)
        self.made.append(FakeEngine(path, self.pieces, self.finish_reason, **options))
        return self.made[-1]

    @property
    def engine(self) -> FakeEngine:
        return self.made[-1]


@pytest.fixture
def factory() -> FakeFactory:
    return FakeFactory()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A file that is named like a model; the fake engine does not look inside."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


class FakeHub:
    """A Hub on loopback that serves repositories from a dict; remembers the requests."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def commit(self, repo: str) -> str:
        return hashlib.sha1(repo.encode()).hexdigest()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requests.append(f"{request.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._api(request, "/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file(request, "/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._send(request, 404, b"")

    def _api(self, request: BaseHTTPRequestHandler, repo: str, rest: list[str]) -> None:
        if repo in self.gated:
            self._send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if repo not in self.repos:
            self._send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        files = self.repos[repo]
        if rest[:1] == ["tree"]:
            body: Any = [
                {"type": "file", "path": name, "size": len(data), "oid": self._etag(data)}
                for name, data in files.items()
            ]
        else:
            body = {
                "id": repo,
                "sha": self.commit(repo),
                "siblings": [{"rfilename": n, "size": len(d)} for n, d in files.items()],
            }
        self._send(request, 200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, request: BaseHTTPRequestHandler, repo: str, name: str) -> None:
        data = self.repos.get(repo, {}).get(name)
        if data is None:
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{self._etag(data)}"', "X-Repo-Commit": self.commit(repo)}
        self._send(request, 200, data, headers)

    @staticmethod
    def _etag(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.thread.start()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    yield hub
    hub.server.shutdown()
    hub.thread.join()
    hub.server.server_close()
