"""A real server on a free port of loopback, in a thread, and a client that hides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import uvloop
from helpers.scripted_core import ScriptedCore, make_async_llm, make_tokenizer

from twostep.contracts.sampling import SamplingParams, StructuredOutputsParams
from twostep.frontend.async_llm import AsyncLLM
from twostep.server.app import build_app, build_shedder
from twostep.server.launcher import Server, listen
from twostep.server.middleware.custom import Middleware
from twostep.server.parsers.formats import choose_formats
from twostep.server.settings import ServerSettings
from twostep.server.state import ServerState

T = TypeVar("T")


class Answer:
    """A whole response."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, checked for its shape."""
        document = self.json
        assert set(document) == {"error"}, document
        error: dict[str, Any] = document["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of all events; [DONE] as text. Comments are left out."""
        assert self.headers["content-type"].startswith("text/event-stream")
        found = []
        for block in self.body.decode().split("\n\n"):
            if block and not block.startswith(":"):
                assert block.startswith("data: "), block
                data = block.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
        return found


class LiveServer:
    """A server that runs until ``stop``."""

    def __init__(
        self,
        *,
        load_at_once: bool = True,
        uds: str | None = None,
        chat_template: str | None = None,
        structured_outputs: bool = False,
        tls: ssl.SSLContext | None = None,
        middleware: Sequence[Middleware] = (),
        **settings: Any,
    ) -> None:
        self._chat_template = chat_template
        self._structured_outputs = structured_outputs
        self._tls = tls
        self._middleware = middleware
        self.reject_long_max_tokens = False
        settings.setdefault("served_model_names", ("tiny", "alias/of-tiny"))
        self.settings = ServerSettings(**settings)
        self.sock = listen("127.0.0.1", 0, uds)
        self.port: int = 0 if uds else self.sock.getsockname()[1]
        self.load_error: Exception | None = None
        self.error: BaseException | None = None
        self.core: ScriptedCore
        self.state: ServerState
        self.loop: asyncio.AbstractEventLoop
        self.server: Server
        self._may_load = threading.Event()
        self._is_up = threading.Event()
        if load_at_once:
            self._may_load.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_up.wait(50)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            self.error = error
            self._is_up.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.state = ServerState(self.settings)
        app = build_app(self.state, middleware=self._middleware)
        shedder = build_shedder(self.state, self._middleware)
        self.server = Server(app, self.state, self.sock, self._load, self._tls, shedder)
        if not self._may_load.is_set():
            self._is_up.set()
        await self.server.run()

    async def _load(self) -> AsyncLLM:
        self.state.loading("weights", 0.42)
        while not self._may_load.is_set():
            await asyncio.sleep(0.005)
        if self.load_error is not None:
            raise self.load_error
        tokenizer = make_tokenizer(self._chat_template)
        self.core = ScriptedCore(tokenizer)
        engine = make_async_llm(
            self.core,
            check_grammar=_accept_any if self._structured_outputs else None,
            reject_long_max_tokens=self.reject_long_max_tokens,
        )
        self.state.ready(engine, SamplingParams(), choose_formats(tokenizer.chat_template))
        self._is_up.set()
        return engine

    def finish_loading(self, error: Exception | None = None) -> None:
        """Let a server that was told to wait load its engine."""
        self.load_error = error
        self._may_load.set()

    def call(self, function: Callable[[], T]) -> T:
        """Run something on the server's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(50)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when a condition holds on the server's loop."""

        async def wait() -> None:
            async with asyncio.timeout(50):
                while not condition():
                    await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(55)

    def request_stop(self) -> None:
        """As a SIGTERM."""
        self.loop.call_soon_threadsafe(self.server.request_stop)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(50)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """End at once."""
        if self._thread.is_alive():
            self.request_stop()
            with contextlib.suppress(RuntimeError):
                self.request_stop()
        self.join()

    # -- the client --------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=50)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One exchange over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=50)
        try:
            # A server that refuses a body may hang up before all of it was sent.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            data = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, data)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        """POST a JSON value, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, data, {"Content-Type": "application/json", **headers})

    def chat(self, content: str = "Hi", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def complete(self, prompt: Any = "Once", **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def open_stream(self, path: str, body: Any) -> OpenStream:
        """Start a request whose answer is read bit by bit."""
        return OpenStream(self.connect(), path, body)


class OpenStream:
    """A request over a bare connection."""

    def __init__(self, sock: socket.socket, path: str, body: Any) -> None:
        self.sock = sock
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        sock.sendall(head.encode() + data)
        self.received = b""

    def read_until(self, mark: bytes) -> bytes:
        """Read until ``mark`` has come; all that has come so far."""
        while mark not in self.received:
            piece = self.sock.recv(65536)
            assert piece, f"the connection ended before {mark!r}: {self.received!r}"
            self.received += piece
        return self.received

    def read_to_end(self) -> bytes:
        """Read until the server closes or the chunked body ends."""
        while not self.received.endswith(b"0\r\n\r\n"):
            piece = self.sock.recv(65536)
            if not piece:
                break
            self.received += piece
        return self.received

    def close(self) -> None:
        self.sock.close()


def _accept_any(params: StructuredOutputsParams) -> None:
    """The scripted core keeps no constraint, so none is checked."""


@contextlib.contextmanager
def live_server(**options: Any) -> Iterator[LiveServer]:
    """A server for a block of code."""
    server = LiveServer(**options)
    try:
        yield server
    finally:
        server.stop()
