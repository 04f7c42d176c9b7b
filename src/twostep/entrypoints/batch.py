"""Files of requests, in OpenAI's batch format: read, answered, written."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from twostep.contracts.errors import UsageError
from twostep.server.offline import ask

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""What a line may ask for."""


class BatchLine(msgspec.Struct, kw_only=True):
    """One request of the input."""

    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]


class BatchResponse(msgspec.Struct, kw_only=True):
    """What the endpoint said."""

    status_code: int
    request_id: str
    body: msgspec.Raw | None


class BatchResult(msgspec.Struct, kw_only=True):
    """One line of the output."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: Any = None
    """The error's fields, if ``response`` has none that is a success."""


_decode = msgspec.json.Decoder(BatchLine).decode
_encode = msgspec.json.Encoder().encode


def read_batch(file: Path) -> list[BatchLine]:
    """The requests of a JSON-lines file.

    Raises UsageError with the number of the first line that is none, or asks for what is not there.
    """
    try:
        text = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    lines = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(text.split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{file}, line {number}"
        try:
            line = _decode(raw)
        except msgspec.DecodeError as error:
            raise UsageError(f"{where}: {error}") from None
        if line.method.upper() != "POST" or line.url not in URLS:
            raise UsageError(f"{where}: {line.method} {line.url}: only POST {', '.join(URLS)}")
        if line.body.get("stream"):
            raise UsageError(f"{where}: a batch does not stream: leave stream out")
        if line.custom_id in seen:
            raise UsageError(
                f"{where}: custom_id {line.custom_id!r} is that of line {seen[line.custom_id]}, too"
            )
        seen[line.custom_id] = number
        lines.append(line)
    if not lines:
        raise UsageError(f"{file} has no requests")
    return lines


async def answer_batch(
    app: ASGIApp,
    lines: Iterable[BatchLine],
    *,
    concurrency: int,
    on_done: Callable[[int], None] = lambda done: None,
) -> AsyncIterator[BatchResult]:
    """Results in the order of the lines; ``concurrency`` requests are under way at once.

    One that fails is a result like any other. ``on_done`` is told how many have ended.
    """
    gate = asyncio.Semaphore(concurrency)
    num_done = 0

    async def one(line: BatchLine) -> BatchResult:
        nonlocal num_done
        async with gate:
            result = await _answer(app, line)
        num_done += 1
        on_done(num_done)
        return result

    tasks = [asyncio.create_task(one(line)) for line in lines]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(app: ASGIApp, line: BatchLine) -> BatchResult:
    status, headers, body = await ask(app, "POST", line.url, _encode(line.body))
    is_success = status == 200
    error = None
    if not is_success:
        error = msgspec.json.decode(body).get("error")
    return BatchResult(
        id=f"batch_req_{uuid.uuid4().hex}",
        custom_id=line.custom_id,
        response=BatchResponse(
            status_code=status,
            request_id=headers.get("x-request-id", ""),
            body=msgspec.Raw(body) if is_success else None,
        ),
        error=error,
    )


def encode_result(result: BatchResult) -> bytes:
    """A line of the output file."""
    return _encode(result) + b"\n"
