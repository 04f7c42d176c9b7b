"""A client of llama-server that costs little: lines and their times, read as JSON afterwards."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cells import Request
from benchmarks.figures import Answer
from benchmarks.process import Program, ProgramError

STARTED_WITHIN = 600.0
"""Seconds."""
Line = tuple[float, bytes]


class Server:
    """A running llama-server."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.port = free_port()
        self.program = Program(
            [*command, "--host", "127.0.0.1", "--port", str(self.port)], environment
        )

    def wait(self) -> None:
        """Until it takes requests. Raises ProgramError if it ends or takes too long."""
        deadline = time.monotonic() + STARTED_WITHIN
        while time.monotonic() < deadline:
            self.program.check_alive()
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.005)
        raise ProgramError("llama-server is not ready after ten minutes")

    def run(self, requests: Sequence[Request], *, greedy: bool = False) -> list[Answer]:
        """Serve requests, each from its arrival on."""
        return asyncio.run(self._run(requests, greedy=greedy))

    async def _run(self, requests: Sequence[Request], *, greedy: bool) -> list[Answer]:
        started = time.perf_counter()
        lines = await asyncio.gather(
            *(stream(self.port, request, started, greedy=greedy) for request in requests)
        )
        return [parse_stream(each) for each in lines]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def stream(port: int, request: Request, started: float, *, greedy: bool) -> list[Line]:
    """Send a request at its arrival; the events of its answer with the times they came."""
    await asyncio.sleep(max(0.0, started + request.arrival - time.perf_counter()))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(http_request(request, greedy=greedy))
        lines = []
        async for line in reader:
            if line.startswith((b"data: ", b"HTTP/", b'{"error"', b"error: ")):
                lines.append((time.perf_counter() - started, line))
        return lines
    finally:
        writer.close()


def http_request(request: Request, *, greedy: bool) -> bytes:
    """Sampling is the server's own default (temperature 0.8, top-k 40, top-p 0.95, min-p 0.05)."""
    body: dict[str, Any] = {
        "prompt": request.prompt,
        "n_predict": request.max_tokens,
        "seed": request.seed,
        "ignore_eos": True,
        "cache_prompt": True,
        "return_tokens": True,
        "stream": True,
    }
    if greedy:
        body["temperature"] = 0
    text = json.dumps(body).encode()
    head = (
        "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


def parse_stream(lines: Sequence[Line]) -> Answer:
    """The tokens of an answer.

    A piece of a character is held back until the rest has come: its token then counts as come with
    the event that brings it. ``tokens_predicted`` of the last event is the count in all.

    Raises:
        ProgramError: The server refused the request or broke off.
    """
    times: list[float] = []
    token_ids: list[int] = []
    for moment, line in lines:
        if line.startswith(b"HTTP/"):
            if b" 200 " not in line:
                raise ProgramError(f"llama-server answered {line.decode().strip()}")
            continue
        if not line.startswith(b"data: "):
            raise ProgramError(f"llama-server: {line.decode(errors='replace').strip()[:200]}")
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise ProgramError(f"llama-server: {event['error']}")
        if event.get("stop"):
            missing = int(event["tokens_predicted"]) - len(times)
            times += [moment] * missing
            return Answer(times=times, token_ids=token_ids)
        tokens = [int(token) for token in event.get("tokens", [])]
        times += [moment] * len(tokens)
        token_ids += tokens
    raise ProgramError("llama-server broke off in the middle of an answer")
