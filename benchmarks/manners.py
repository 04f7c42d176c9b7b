"""What the server does to people when others behave badly: cut streams, slow readers, overload.

    python -m benchmarks.manners [MODEL] [--check cuts slow overload overhead] [--json FILE]

Starts ``twostep serve MODEL`` for each check. Limits are those the project promises; the exit code
is 1 if one is broken. Takes some eight minutes; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import resource
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.process import Program, ProgramError, memory_mb
from twostep import LLM, SamplingParams
from twostep.entrypoints.load.client import Outcome, Target, send
from twostep.entrypoints.load.datasets import Prompt
from twostep.entrypoints.load.http_stream import ConnectionLostError, HttpPool
from twostep.entrypoints.load.run import run_load

STARTED_WITHIN = 120.0
NUM_CUTS = 1000
CUT_ROUNDS = 20
CUT_WITHIN = 0.1
"""Seconds within which the streams of a round are opened and cut."""
SLOW_READERS = 200
SLOW_TURNS = 7
STREAMS = 16
"""Well-behaved streams beside them."""
OVERLOAD = 10
"""Times the load that the server can take."""
OVERLOAD_TURNS = 4
OVERLOAD_SECONDS = 30.0
"""Of a turn."""
KV_BYTES = "512M"
"""``--kv-cache-memory-bytes`` of the overload check."""
QUEUE = 32
"""``--max-num-queued-reqs`` of the overload check."""
OVERHEAD_STARTS = 3
"""Times both engines are started anew: where a process has its weights in memory is worth some
milliseconds of a first token, for as long as it lives."""
OVERHEAD_ROUNDS = 3
OVERHEAD_SINGLES = 10
"""Requests alone in each round."""
PEACE = 0.25
"""Seconds until the threads of the other engine sleep."""
FETCHING = 2.0
"""Seconds until they have touched the memory that the next requests will need."""
WORDS = " ".join(["the", "cat", "sat", "on", "the", "mat"] * 20)


class Server:
    """A running ``twostep serve`` on a free port."""

    def __init__(self, model: str, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [sys.executable, "-m", "twostep", "serve", model, "--port", str(self.port)]
        self.program = Program([*command, "--disable-uvicorn-access-log", *flags])
        self.pool = HttpPool(f"http://127.0.0.1:{self.port}")

    async def wait_ready(self) -> None:
        """Until requests are taken."""
        end = time.monotonic() + STARTED_WITHIN
        while time.monotonic() < end:
            self.program.check_alive()
            with contextlib.suppress(OSError, ConnectionLostError):
                async with await self.pool.request("GET", "/ready") as response:
                    await response.read()
                    if response.status == 200:
                        return
            await asyncio.sleep(0.02)
        raise ProgramError("the server is not ready")

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        async with await self.pool.request("GET", "/metrics") as response:
            text = (await response.read()).decode()
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    async def wait_idle(self, seconds: float) -> float | None:
        """Seconds until nobody runs or waits and no block is held; None if that takes longer."""
        started = time.perf_counter()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while time.perf_counter() - started < seconds:
            if not any([await self.metric(f"vllm:{name}") for name in names]):
                return time.perf_counter() - started
            await asyncio.sleep(0.02)
        return None

    def rss_mb(self) -> float:
        """Memory of both processes now."""
        pids = [self.program.popen.pid, *_children(self.program.popen.pid)]
        return sum(memory_mb(pid, "VmRSS") or 0.0 for pid in pids)


@contextlib.asynccontextmanager
async def serving(model: str, *flags: str) -> AsyncIterator[Server]:
    """A server that is ready; killed at the end."""
    server = Server(model, *flags)
    try:
        await server.wait_ready()
        yield server
    finally:
        server.pool.close()
        server.program.kill()


def _children(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(word) for word in words]


def target(server: Server, **body: Any) -> Target:
    """Completions with exactly as many tokens as asked for."""
    return Target(
        backend="openai", endpoint="/v1/completions", model="", headers={},
        body={"temperature": 0, "ignore_eos": True, **body},
    )  # fmt: skip


def prompt(number: int, output_len: int) -> Prompt:
    """Prompts that share nothing."""
    return Prompt(f"Story {number}: {WORDS}", 0, output_len)


# -- the checks ------------------------------------------------------------------------------------


async def check_cuts(model: str) -> dict[str, Any]:
    """1,000 streams opened and cut within 100 ms, 20 times over; then an ordinary request."""
    back: list[float] = []
    async with serving(model) as server:
        body = json.dumps(
            {"prompt": WORDS, "max_tokens": 500, "stream": True, "ignore_eos": True}
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        await send(server.pool, target(server), prompt(0, 8))
        for _ in range(CUT_ROUNDS):
            await _open_and_cut(server.port, head + body)
            idle = await server.wait_idle(30.0)
            back.append(30.0 if idle is None else idle)
        after = await send(server.pool, target(server), prompt(1, 8))
        log = server.program.last_words()
    errors = [word for word in ("error", "Traceback", "exception") if word in log.lower()]
    return {
        "seconds_until_blocks_are_back": {"median": statistics.median(back), "worst": max(back)},
        "next_request": after.success,
        "logged": errors,
        "holds": max(back) < 1.0 and after.success and not errors,
    }


async def _open_and_cut(port: int, message: bytes) -> None:
    end = time.perf_counter() + CUT_WITHIN

    async def one() -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(message)
            await asyncio.sleep(max(0.0, end - time.perf_counter()))
            writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(NUM_CUTS)))


async def check_slow(model: str) -> dict[str, Any]:
    """200 clients read a byte a second; others' time per token, with and without, in turns."""
    async with serving(model) as server:
        alone: list[float] = []
        beside: list[float] = []
        await _gaps(server, 0)
        alone.append(await _gaps(server, 1))
        for number in range(SLOW_TURNS):
            readers = [
                asyncio.ensure_future(_read_slowly(server.port)) for _ in range(SLOW_READERS)
            ]
            await asyncio.sleep(0.5)
            await server.wait_idle(60.0)  # their answers are made, and wait to be read
            beside.append(await _gaps(server, 2 * number + 2))
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            alone.append(await _gaps(server, 2 * number + 3))
    # Beside what came before and after: a machine shared with others drifts by more than the limit.
    pairs = zip(itertools.pairwise(alone), beside, strict=True)
    worse = statistics.median(b / statistics.fmean(a) - 1 for a, b in pairs)
    return {
        "ms_per_token_alone": [1000 * value for value in alone],
        "ms_per_token_beside": [1000 * value for value in beside],
        "worse_by": worse,
        "holds": worse < 0.05,
    }


async def _gaps(server: Server, run: int) -> float:
    """Mean seconds between tokens of some streams."""
    prompts = [prompt(100 * run + i, 128) for i in range(STREAMS)]
    outcomes, _ = await run_load(server.pool, target(server), prompts, [0.0] * STREAMS)
    _must_succeed(outcomes)
    return statistics.fmean(gap for outcome in outcomes for gap in outcome.itl)


async def _read_slowly(port: int) -> None:
    body = json.dumps(
        {"prompt": "Once", "max_tokens": 64, "stream": True, "ignore_eos": True}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    with contextlib.suppress(asyncio.CancelledError):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            b"\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        while await reader.read(1):
            await asyncio.sleep(1.0)
    writer.transport.abort()


async def check_overload(model: str) -> dict[str, Any]:
    """Ten times what the server can take, for two minutes, with a bounded queue.

    In turns with the load it takes well: a shared machine may have another speed a minute later.
    """
    # A small cache, full before memory is watched: pages of an unused one come in as prompts do.
    flags = ("--max-num-queued-reqs", str(QUEUE), "--kv-cache-memory-bytes", KV_BYTES)
    goodput: list[float] = []
    outcomes: list[Outcome] = []
    async with serving(model, *flags) as server:
        await _peak(server, 0)
        peaks = [await _peak(server, 1000)]
        memory = [server.rss_mb()]
        sampler = asyncio.ensure_future(_sample(memory, server.rss_mb))
        for turn in range(OVERLOAD_TURNS):
            rate = OVERLOAD * peaks[-1]
            count = int(rate * OVERLOAD_SECONDS)
            crowd = [prompt(100_000 * (turn + 1) + i, 32) for i in range(count)]
            times = [i / rate for i in range(count)]
            came, seconds = await run_load(server.pool, target(server), crowd, times)
            await server.wait_idle(60.0)
            peaks.append(await _peak(server, 1000 * (turn + 2)))
            good = sum(outcome.success for outcome in came)
            goodput.append(good / seconds / statistics.fmean(peaks[-2:]))
            outcomes += came
        sampler.cancel()
    refused = [outcome for outcome in outcomes if outcome.error.startswith("HTTP 503")]
    other = sum(not outcome.success for outcome in outcomes) - len(refused)
    waits = sorted(outcome.latency for outcome in refused)
    half = memory[len(memory) // 4 :]
    growth = statistics.fmean(half[-10:]) - statistics.fmean(half[:10])
    p99 = waits[int(0.99 * (len(waits) - 1))] if waits else 0.0
    share = statistics.median(goodput)
    return {
        "peak_requests_per_second": peaks,
        "goodput_shares_of_peak": goodput,
        "goodput_share_of_peak": share,
        "refused": len(refused),
        "neither_answered_nor_refused": other,
        "refusal_ms": {"median": 1000 * statistics.median(waits or [0.0]), "p99": 1000 * p99},
        "rss_growth_mb": growth,
        "holds": share >= 0.95 and p99 < 0.02 and other == 0 and growth < 20.0,
    }


async def _peak(server: Server, first: int) -> float:
    """Requests per second of as many streams as the server takes well."""
    prompts = [prompt(first + i, 32) for i in range(STREAMS * 12)]
    outcomes, seconds = await run_load(
        server.pool, target(server), prompts, [0.0] * len(prompts), max_concurrency=STREAMS
    )
    _must_succeed(outcomes)
    return len(outcomes) / seconds


async def _sample(values: list[float], read: Callable[[], float]) -> None:
    while True:
        await asyncio.sleep(1.0)
        values.append(read())


async def check_overhead(model: str) -> dict[str, Any]:
    """The same requests by ``LLM`` in this process and over HTTP, in turns.

    Both engines are there all the time: one that has nothing to do takes no core.
    """
    offline: list[float] = []
    online: list[float] = []
    added: list[float] = []
    for start in range(OVERHEAD_STARTS):
        async with serving(model) as server:
            with LLM(model) as llm:
                for number in range(start, start + OVERHEAD_ROUNDS):
                    prompts = [prompt(1000 * number + i, 128) for i in range(32)]
                    for is_online in (number % 2 == 0, number % 2 == 1):
                        await asyncio.sleep(FETCHING)
                        if is_online:
                            online.append(await _online_rate(server, prompts))
                        else:
                            offline.append(_offline_rate(llm, prompts))
                    for i in range(OVERHEAD_SINGLES):
                        one = prompt(100_000 + 100 * number + i, 4)
                        await asyncio.sleep(PEACE)
                        without = _offline_ttft(llm, one)
                        await asyncio.sleep(PEACE)
                        added.append((await send(server.pool, target(server), one)).ttft - without)
    losses = [1 - b / a for a, b in zip(offline, online, strict=True)]
    loss, extra = statistics.median(losses), statistics.median(added)
    return {
        "tokens_per_second_offline": offline,
        "tokens_per_second_http": online,
        "throughput_lost": loss,
        "ttft_added_ms": 1000 * extra,
        "holds": loss <= 0.10 and extra <= 0.003,
    }


async def _online_rate(server: Server, prompts: list[Prompt]) -> float:
    """Output tokens per second of all at once."""
    outcomes, seconds = await run_load(server.pool, target(server), prompts, [0.0] * len(prompts))
    _must_succeed(outcomes)
    return sum(outcome.output_len for outcome in outcomes) / seconds


def _offline_rate(llm: LLM, prompts: list[Prompt]) -> float:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=prompts[0].output_len)
    started = time.perf_counter()
    outputs = llm.generate([one.text for one in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def _offline_ttft(llm: LLM, one: Prompt) -> float:
    """Seconds to the first text."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=one.output_len)
    started = time.perf_counter()
    stream = llm.stream(one.text, params)
    next(output for output in stream if output.outputs[0].text)
    seconds = time.perf_counter() - started
    for _ in stream:
        pass
    return seconds


def _must_succeed(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if not outcome.success:
            raise ProgramError(f"a request failed: {outcome.error}")


CHECKS = {
    "cuts": check_cuts,
    "slow": check_slow,
    "overload": check_overload,
    "overhead": check_overhead,
}


def main() -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--check", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    report = {}
    for name in args.check:
        print(f"{name} …", file=sys.stderr)
        report[name] = uvloop.run(CHECKS[name](args.model))
        print(json.dumps({name: report[name]}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(result["holds"] for result in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
