"""The life of a server: listen, load, serve, load again if the engine dies, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from twostep.contracts.errors import EngineDeadError, UsageError
from twostep.frontend.async_llm import AsyncLLM
from twostep.server.http_protocol import HttpProtocol
from twostep.server.in_flight import Interrupt
from twostep.server.load_shedder import LoadShedder
from twostep.server.settings import ServerSettings
from twostep.server.state import ServerState

logger = logging.getLogger("twostep.server")

KEEP_ALIVE_SECONDS = 75
FLUSH_SECONDS = 2.0
"""For the last bytes of interrupted requests."""
DATE_SECONDS = 1.0
"""How often the Date header changes."""
RESTART_WINDOW_SECONDS = 600.0
MAX_RESTART_PAUSE_SECONDS = 30.0
"""The first restart comes at once, the next after 1, 2, 4 ... seconds."""
FILE_LIMIT = 65536


def listen(host: str, port: int, uds: str | None = None) -> socket.socket:
    """A listening socket, before anything is loaded.

    Raises UsageError (exit code 2) if the address is taken or is not this machine's.
    """
    if uds is not None:
        return _listen_unix(uds)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}; take another --port "
            "(0 takes any that is free)"
        ) from None
    sock.setblocking(False)
    return sock


def _listen_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody listens on any more."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) != 0:
                    Path(path).unlink()


def url_of(sock: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    """Where clients reach a listening socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it: each stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        wanted = FILE_LIMIT if hard == resource.RLIM_INFINITY else min(FILE_LIMIT, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which the launcher has, and without its clock.

    That one looks ten times a second whether it shall end, and takes a core from a step each time.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end = asyncio.Event()

    def end(self) -> None:
        """Stop serving."""
        self.should_exit = True
        self._end.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def main_loop(self) -> None:
        """Write the Date header until the end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), DATE_SECONDS)


class Server:
    """Serves ``app`` on ``sock`` while an engine is loaded and as long as it lives."""

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        sock: socket.socket,
        load: Callable[[], Awaitable[AsyncLLM]],
        tls: ssl.SSLContext | None = None,
        shedder: LoadShedder | None = None,
    ) -> None:
        """``load`` loads the engine and calls ``state.ready``; what it raises ends the server.

        ``tls``: answer over HTTPS. ``shedder`` answers before ``app`` where it can.
        """
        self._state = state
        self._sock = sock
        self._load = load
        self._uvicorn = _Uvicorn(_uvicorn_config(app, state.settings, tls, shedder))
        self._stop = asyncio.Event()
        """Somebody asked for the end."""
        self._stop_now = asyncio.Event()
        """Somebody asked twice."""
        self._restarts: list[float] = []
        """When engines that died were started again, seconds of the monotonic clock."""
        self.interrupted = False
        """Whether the end was asked for by Ctrl-C."""

    def request_stop(self, *, interrupt: bool = False) -> None:
        """Drain and end; the second call ends at once."""
        if self._stop.is_set():
            self._stop_now.set()
        self.interrupted |= interrupt
        self._stop.set()

    async def run(self) -> None:
        """Serve until the end. Raises what loading raised, or EngineDeadError."""
        serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._sock]))
        stopping = asyncio.ensure_future(self._stop.wait())
        engine: AsyncLLM | None = None
        try:
            engine = await self._start(serving, stopping)
            while engine is not None and await self._serve(engine, serving, stopping):
                engine = await self._restart(engine, serving, stopping)
        finally:
            stopping.cancel()
            self._uvicorn.end()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            if engine is not None:
                await engine.shutdown()
            await self._state.observability.close()

    async def _start(
        self, serving: asyncio.Future[None], stopping: asyncio.Future[Any]
    ) -> AsyncLLM | None:
        """The loaded engine; None if the end came first. Raises what loading raised."""
        loading = asyncio.ensure_future(self._load())
        try:
            first: set[asyncio.Future[Any]] = {serving, loading, stopping}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            return await loading if loading.done() else None
        finally:
            await _end(loading)

    async def _serve(
        self, engine: AsyncLLM, serving: asyncio.Future[None], stopping: asyncio.Future[Any]
    ) -> bool:
        """Until the end; True if the engine has died before."""
        death = asyncio.ensure_future(engine.wait_dead())
        try:
            ends: set[asyncio.Future[Any]] = {serving, stopping, death}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await self._drain(engine)
            return not stopping.done() and not serving.done()
        finally:
            death.cancel()

    async def _restart(
        self, dead: AsyncLLM, serving: asyncio.Future[None], stopping: asyncio.Future[Any]
    ) -> AsyncLLM | None:
        """Another engine in place of one that died, as long as that does not happen too often.

        None if the end came first. Raises EngineDeadError when it has happened too often, what
        loading raised if that is something else.
        """
        error = dead.dead_error
        most = self._state.settings.max_core_restarts
        while True:
            now = time.monotonic()
            self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW_SECONDS]
            tries = len(self._restarts)
            if tries >= most:
                self._state.status = "dead"
                await self._flush()
                await dead.shutdown()
                times = f" (restarts within 10 minutes: {tries})" if tries else ""
                raise EngineDeadError(f"{error}{times}")
            self._restarts.append(now)
            self._state.restarting()
            logger.error("%s: starting it again (%d of %d in 10 minutes)", error, tries + 1, most)
            await dead.shutdown()
            if tries:
                ends: set[asyncio.Future[Any]] = {serving, stopping}
                pause = min(MAX_RESTART_PAUSE_SECONDS, 2.0 ** (tries - 1))
                done, _ = await asyncio.wait(
                    ends, timeout=pause, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    return None
            try:
                return await self._start(serving, stopping)
            except EngineDeadError as again:
                error = again

    async def _drain(self, engine: AsyncLLM) -> None:
        """Take no more requests, let those that run go on for a while, then cut them."""
        self._state.status = "draining"
        in_flight = self._state.in_flight
        if len(in_flight):
            logger.info("draining: %d requests run", len(in_flight))
        idle = asyncio.ensure_future(in_flight.wait_idle())
        now = asyncio.ensure_future(self._stop_now.wait())
        try:
            await asyncio.wait(
                {idle, now},
                timeout=self._state.settings.shutdown_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            idle.cancel()
            now.cancel()
        if len(in_flight):
            logger.warning("%d requests did not end in time and are cut", len(in_flight))
            in_flight.interrupt_all(Interrupt.SHUTTING_DOWN)
            await self._flush()

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.in_flight.wait_idle(), FLUSH_SECONDS)

    def handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """SIGTERM and SIGINT drain; a second one stops at once."""
        loop.add_signal_handler(signal.SIGTERM, self.request_stop)
        loop.add_signal_handler(signal.SIGINT, lambda: self.request_stop(interrupt=True))


async def _end(task: asyncio.Future[AsyncLLM]) -> None:
    """Cancel a task and wait for it; whatever it raises has been told, or does not matter."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _uvicorn_config(
    app: ASGIApp,
    settings: ServerSettings,
    tls: ssl.SSLContext | None,
    shed: LoadShedder | None,
) -> uvicorn.Config:
    class Protocol(HttpProtocol):
        shedder = shed
        max_header_bytes = settings.max_header_bytes
        max_headers = settings.max_headers

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        root_path=settings.root_path,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=3,
    )
    config.load()
    config.ssl = tls  # made and checked before anything was loaded
    return config
