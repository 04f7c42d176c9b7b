"""One request of a load test: sent, streamed, timed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from twostep.entrypoints.load.datasets import Prompt
from twostep.entrypoints.load.http_stream import ConnectionLostError, HttpPool

Backend = Literal["openai", "openai-chat"]
ENDPOINTS: dict[Backend, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


class Outcome(msgspec.Struct):
    """What came of one request. Times in seconds."""

    prompt_len: int
    start_time: float
    """Of ``time.perf_counter``."""
    success: bool = False
    output_len: int = 0
    """By the server's usage if it told, else chunks."""
    ttft: float = 0.0
    """Time to the first piece of the answer."""
    itl: list[float] = msgspec.field(default_factory=list)
    """Time between the pieces."""
    latency: float = 0.0
    queue_time: float = 0.0
    """Time it waited in the load generator for its turn, under a limit of concurrency."""
    text: str = ""
    error: str = ""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and what every request says."""

    backend: Backend
    endpoint: str
    model: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    """Fields added to each request: sampling, ``ignore_eos``, the user's extras."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


def make_body(target: Target, prompt: Prompt) -> bytes:
    """The request as JSON."""
    body: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": prompt.output_len,
    }
    if target.backend == "openai":
        body["prompt"] = prompt.text
    else:
        body["messages"] = [{"role": "user", "content": prompt.text}]
    return _encode(body | dict(target.body))


async def send(pool: HttpPool, target: Target, prompt: Prompt) -> Outcome:
    """Send one request and read its stream to the end; failures are in the outcome."""
    outcome = Outcome(prompt.num_tokens, time.perf_counter())
    try:
        async with await pool.request(
            "POST", target.endpoint, make_body(target, prompt), target.headers
        ) as response:
            if response.status != 200:
                body = (await response.read()).decode(errors="replace")
                outcome.error = f"HTTP {response.status}: {body[:500]}"
                outcome.latency = time.perf_counter() - outcome.start_time
            else:
                reader = _StreamReader(outcome)
                await response.tell(reader.take)
                reader.end()
    except (TimeoutError, OSError, ConnectionLostError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.success = not outcome.error
    return outcome


class _StreamReader:
    """Takes events as they arrive, into an outcome; ``end`` is due behind the last one."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._rest = b""
        self._last = outcome.start_time
        self._pieces: list[str] = []
        self._usage: _Usage | None = None
        self._has_end = False

    def take(self, arrived: float, data: bytes) -> bool:
        """Bytes of the stream; False when an error has made the rest worthless."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):  # a comment keeps the connection alive
                self._take_event(arrived, event[5:].strip())
            if self._outcome.error:
                return False
        return True

    def _take_event(self, arrived: float, payload: bytes) -> None:
        if payload == b"[DONE]":
            self._has_end = True
            return
        outcome = self._outcome
        try:
            chunk = _decode_chunk(payload)
        except msgspec.DecodeError as error:
            outcome.error = f"not a chunk ({error}): {payload[:200]!r}"
            return
        if chunk.error is not None:
            outcome.error = f"error in the stream: {chunk.error}"
            return
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            self._has_end |= choice.finish_reason is not None
            text = _text_of(choice)
            if not text:
                continue
            if self._pieces:
                outcome.itl.append(arrived - self._last)
            else:
                outcome.ttft = arrived - outcome.start_time
            self._last = arrived
            self._pieces.append(text)

    def end(self) -> None:
        """The stream is over; sets ``error`` unless it ended as a good one does."""
        outcome = self._outcome
        if outcome.error:
            return
        outcome.text = "".join(self._pieces)
        outcome.latency = self._last - outcome.start_time
        outcome.output_len = len(self._pieces)
        if self._usage is not None:
            outcome.output_len = self._usage.completion_tokens or 0
            outcome.prompt_len = self._usage.prompt_tokens or outcome.prompt_len
        if not self._pieces:
            outcome.error = "the answer is empty"
        elif not self._has_end:
            outcome.error = "the stream ended without an end"


def _text_of(choice: _Choice) -> str | None:
    if choice.delta is None:
        return choice.text
    return choice.delta.content or choice.delta.reasoning or choice.delta.reasoning_content
