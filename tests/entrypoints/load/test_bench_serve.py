"""``bench serve`` against a scripted server: what it sends, times and calls a failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.errors import TwostepError, UsageError
from twostep.entrypoints.cli import bench_serve
from twostep.entrypoints.load.client import Target, send
from twostep.entrypoints.load.datasets import Prompt
from twostep.entrypoints.load.http_stream import ConnectionLostError, HttpPool
from twostep.entrypoints.load.run import first_model, run_load, wait_until_ready

PROMPT = Prompt("the cat", 2, 3)
Answer = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request as the scripted server sees it."""

    def __init__(self, path: str, headers: dict[str, str], body: Any, writer: Any) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self._writer = writer

    async def start(self, status: int = 200) -> None:
        self._writer.write(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())

    async def write(self, text: str) -> None:
        """One HTTP chunk."""
        self._writer.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        await self._writer.drain()

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")

    def hang_up(self) -> None:
        self._writer.close()


class Server:
    """Keeps what was asked; answers by script."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.seen: list[Exchange] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""

    @property
    def num_connections(self) -> int:
        return len(self.writers)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("Content-Length", 0)))
                exchange = Exchange(
                    head[0].split()[1], headers, json.loads(body or b"null"), writer
                )
                self.seen.append(exchange)
                await self.answer(exchange)
        writer.close()


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[Server, HttpPool]]:
    server = Server(answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    pool = HttpPool(server.url)
    try:
        yield server, pool
    finally:
        pool.close()
        listener.close()
        for writer in server.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def target(backend: Any = "openai", **body: Any) -> Target:
    return Target(backend=backend, endpoint="/v1/x", model="m", headers={"X-Key": "k"}, body=body)


def chunk(text: str = "", **more: Any) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "text": text}], **more}) + "\n\n"


async def good(exchange: Exchange) -> None:
    """Three pieces, cut in awkward places, a comment between them, then usage."""
    await exchange.start()
    whole = (
        chunk("a")
        + ": keep-alive\n\n"
        + chunk("b")
        + chunk("")
        + chunk("c")
        + 'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5}}\n\n'
        + "data: [DONE]\n\n"
    )
    for start in range(0, len(whole), 7):
        await exchange.write(whole[start : start + 7])
    await exchange.end()


def test_a_stream_is_read_and_the_connection_kept() -> None:
    async def play() -> None:
        async with serving(good) as (server, pool):
            first = await send(pool, target(temperature=0), PROMPT)
            second = await send(pool, target(), PROMPT)
            assert server.num_connections == 1
            assert first.success, first.error
            assert (first.text, first.output_len, first.prompt_len) == ("abc", 5, 4)
            assert len(first.itl) == 2
            assert 0 < first.ttft <= first.latency
            assert first.latency == pytest.approx(first.ttft + sum(first.itl))
            assert second.success
            body = server.seen[0].body
            assert server.seen[0].headers["X-Key"] == "k"
            assert body["prompt"] == "the cat"
            assert body["max_tokens"] == 3
            assert body["stream_options"] == {"include_usage": True}
            assert body["temperature"] == 0

    asyncio.run(play())


def test_chat_counts_reasoning_as_answer() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start()
        for delta in ({"role": "assistant"}, {"reasoning": "r"}, {"content": "c"}, {}):
            choice = {"delta": delta, "finish_reason": None if delta else "stop"}
            await exchange.write("data: " + json.dumps({"choices": [choice]}) + "\n\n")
        await exchange.end()

    async def play() -> None:
        async with serving(answer) as (server, pool):
            outcome = await send(pool, target("openai-chat"), PROMPT)
            assert outcome.success, outcome.error
            assert (outcome.text, outcome.output_len) == ("rc", 2)
            assert server.seen[0].body["messages"] == [{"role": "user", "content": "the cat"}]

    asyncio.run(play())


async def refused(exchange: Exchange) -> None:
    await exchange.start(429)
    await exchange.write('{"error": "full"}')
    await exchange.end()


async def error_inside(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.write(chunk("a") + 'data: {"error": {"message": "broke"}}\n\n')
    await exchange.end()


async def cut_off(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.write(chunk("a"))
    exchange.hang_up()


async def no_end(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.write(chunk("a"))
    await exchange.end()


async def empty(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.write("data: [DONE]\n\n")
    await exchange.end()


async def garbage(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.write("data: {nonsense\n\n")
    await exchange.end()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refused, "HTTP 429"),
        (error_inside, "broke"),
        (cut_off, "closed the connection"),
        (no_end, "without an end"),
        (empty, "empty"),
        (garbage, "not a chunk"),
    ],
)
def test_a_failure_is_never_a_success(answer: Answer, words: str) -> None:
    async def play() -> None:
        async with serving(answer) as (_, pool):
            outcome = await send(pool, target(), PROMPT)
            assert not outcome.success
            assert words in outcome.error

    asyncio.run(play())


def test_a_connection_that_was_closed_while_it_was_idle_is_not_a_failure() -> None:
    """As llama-server does it: hangs up when the second request comes, answering nothing."""

    async def once(exchange: Exchange) -> None:
        if exchange.path == "/again" and len(seen) == 0:
            seen.append(exchange)
            exchange.hang_up()
            return
        await good(exchange)

    seen: list[Exchange] = []

    async def main() -> None:
        async with serving(once) as (server, pool):
            for path in ("/first", "/again"):
                async with await pool.request("POST", path, b"1") as response:
                    await response.read()
                    assert response.status == 200
            assert server.num_connections == 2
            assert [each.path for each in server.seen] == ["/first", "/again", "/again"]
            # On a new connection it is one.
            seen.clear()
            pool.close()
            with pytest.raises(ConnectionLostError):
                await pool.request("POST", "/again", b"1")

    asyncio.run(main())


def test_nobody_there() -> None:
    async def play() -> None:
        async with serving(good) as (_, pool):
            pass
        outcome = await send(pool, target(), PROMPT)
        assert not outcome.success
        with pytest.raises(TwostepError, match="does not answer"):
            await wait_until_ready(pool, target(), PROMPT, 0.0)
        with pytest.raises(TwostepError, match="is it running"):
            await first_model(pool, {})

    asyncio.run(play())


def test_a_refusal_ends_the_wait_at_once() -> None:
    async def play() -> None:
        async with serving(refused) as (server, pool):
            with pytest.raises(TwostepError, match="HTTP 429"):
                await wait_until_ready(pool, target(), PROMPT, 600.0)
            assert len(server.seen) == 1

    asyncio.run(play())


def test_concurrency_is_bounded() -> None:
    running = most = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        await good(exchange)

    async def play() -> None:
        async with serving(answer) as (_, pool):
            done: list[int] = []
            outcomes, seconds = await run_load(
                pool, target(), [PROMPT] * 9, [0.0] * 9, max_concurrency=3, on_done=done.append
            )
            assert all(outcome.success for outcome in outcomes)
            assert seconds > 0
            assert most == 3
            assert done == list(range(1, 10))
            assert max(outcome.queue_time for outcome in outcomes) > 0

    asyncio.run(play())


def run_command(words: list[str], answer: Answer, capsys: Any) -> tuple[int, Any, Server]:
    """The whole command against a scripted server; the tokenizer comes from the test's words."""
    servers: list[Server] = []

    async def models_first(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await exchange.start()
            await exchange.write('{"data": [{"id": "served"}]}')
            await exchange.end()
        else:
            await answer(exchange)

    async def play() -> dict[str, Any]:
        async with serving(models_first) as (server, _):
            servers.append(server)
            args = bench_serve.make_parser().parse([*words, "--base-url", server.url])
            bench_serve.check(args)
            result = await bench_serve.measure(args)
            bench_serve.print_result(args, result)
            return result

    result = asyncio.run(play())
    return (0 if result["completed"] else 1), capsys.readouterr(), servers[0]


@pytest.fixture
def words_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from entrypoints.load.test_load import WORDS

    monkeypatch.setattr(bench_serve, "load_tokenizer_of", lambda name: WORDS)


@pytest.mark.usefixtures("words_tokenizer")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "5", "--input-len", "4", "--output-len", "3", "--ignore-eos"]
    words += ["--num-warmups", "2", "--save-detailed", "--result-dir", str(tmp_path), "--json"]
    words += ["--metadata", "run=7", "--extra-body", '{"min_p": 0.1}', "--api-key", "secret"]
    code, streams, server = run_command(words, good, capsys)
    assert code == 0
    result = json.loads(streams.out)
    assert (result["completed"], result["failed"], result["model_id"]) == (5, 0, "served")
    assert (result["run"], result["request_rate"]) == ("7", "inf")
    [file] = tmp_path.iterdir()
    assert file.name.startswith("openai-infqps-served-")
    assert json.loads(file.read_text())["generated_texts"] == ["abc"] * 5
    assert "secret" not in file.read_text()
    asked = [exchange for exchange in server.seen if exchange.path == "/v1/completions"]
    assert len(asked) == 1 + 2 + 5
    assert asked[0].body["ignore_eos"] is True
    assert asked[0].body["min_p"] == 0.1
    assert asked[0].headers["Authorization"] == "Bearer secret"


@pytest.mark.usefixtures("words_tokenizer")
def test_failures_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    calls = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal calls
        calls += 1
        await (good if calls == 1 else refused)(exchange)

    code, streams, _ = run_command(["--num-prompts", "2"], answer, capsys)
    assert code == 1
    assert "Failed requests:                         2" in streams.out
    assert "failed: HTTP 429" in streams.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--percentile-metrics", "ttfb"], "ttfb"),
        (["--metric-percentiles", "x"], "list of numbers"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--request-rate", "0"], "above 0"),
        (["--ramp-up-start-rps", "1"], "ramp-up-strategy"),
        (["--ramp-up-strategy", "linear"], "ramp-up-start-rps"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--metadata", "x"], "KEY=VALUE"),
    ],
)
def test_usage(words: list[str], message: str) -> None:
    args = bench_serve.make_parser().parse(words)
    with pytest.raises(UsageError, match=message):
        bench_serve.check(args)


def test_wrong_url() -> None:
    with pytest.raises(UsageError, match="--base-url"):
        HttpPool("localhost:8000")
