"""AsyncLLM over a core in a process of its own: a ghost, so that every token is known."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.ghost_core import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, Behaviour
from helpers.ghost_llm import TESTS, ghost_command, ghost_llm, last_of, start_ghost

from twostep.contracts.errors import EngineDeadError, InvalidRequestError, ModelFileError
from twostep.contracts.live_view import LiveUpdate
from twostep.contracts.outputs import EngineCoreOutputs, SchedulerStats
from twostep.contracts.request import EngineCoreRequest, FinishReason
from twostep.contracts.results import RequestOutput
from twostep.contracts.sampling import RequestOutputKind, SamplingParams
from twostep.contracts.stats import FinishedRequestStats, IterationStats
from twostep.frontend import core_client
from twostep.frontend.async_llm import AsyncLLM
from twostep.frontend.core_client import AsyncMPClient
from twostep.frontend.core_process import CoreProcess
from twostep.sim.ghost_model import oracle

PATIENCE = 40.0

Run = Callable[[Callable[[AsyncLLM], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs coroutine functions on one ghost; each leaves it empty."""
    with asyncio.Runner() as runner:
        llm = runner.run(start_ghost())

        def run_one(function: Callable[[AsyncLLM], Coroutine[Any, Any, Any]]) -> Any:
            value = runner.run(function(llm))
            assert llm.num_unfinished_requests == 0
            return value

        yield run_one
        runner.run(llm.shutdown())


def seeded(max_tokens: int = 8, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
           **params: Any) -> SamplingParams:  # fmt: skip
    """The ghost's tokens depend on the seed alone."""
    return SamplingParams(
        seed=0, ignore_eos=True, max_tokens=max_tokens, output_kind=kind, **params
    )


def ids(*tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": [*tokens]}


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        value = condition()
        if value if isinstance(value, bool) else await value:
            return
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def test_forty_at_once(run: Run) -> None:
    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(
            *[last_of(llm.generate(ids(i, i + 1), seeded(5 + i), f"r{i}")) for i in range(40)]
        )

    for i, output in enumerate(run(main)):
        assert output.request_id == f"r{i}"
        assert output.outputs[0].token_ids == oracle([i, i + 1], 5 + i, [])
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_every_kind_of_output(run: Run, kind: RequestOutputKind) -> None:
    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        return [output async for output in llm.generate(ids(3, 4), seeded(20, kind), "r")]

    outputs = run(main)
    parts = [output.outputs[0].token_ids for output in outputs]
    answer = oracle([3, 4], 20, [])
    match kind:
        case RequestOutputKind.DELTA:
            assert [token for part in parts for token in part] == answer
        case RequestOutputKind.CUMULATIVE:
            assert parts[-1] == answer
        case RequestOutputKind.FINAL_ONLY:
            assert parts == [answer]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_slow_reader_loses_nothing(run: Run) -> None:
    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate(ids(9), seeded(60, RequestOutputKind.DELTA), "r"):
            outputs.append(output)
            await asyncio.sleep(0.02)
        return outputs

    outputs = run(main)
    assert [i for o in outputs for i in o.outputs[0].token_ids] == oracle([9], 60, [])
    assert len(outputs) < 60  # some came together


def test_sequences_of_one_request(run: Run) -> None:
    async def main(llm: AsyncLLM) -> RequestOutput:
        stream = await llm.add_request("r", ids(7), seeded(6, RequestOutputKind.FINAL_ONLY, n=3))
        assert llm.num_unfinished_requests == 3
        return await last_of(stream)

    output = run(main)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert output.outputs[0].token_ids == oracle([7], 6, [])
    assert output.outputs[1].token_ids == oracle([7], 6, [], salt=1)  # the next seed


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        (ids(), seeded(), "prompt"),
        (ids(61), seeded(), "prompt"),
        (ids(*[1] * MAX_MODEL_LEN), seeded(), "prompt"),
        (ids(1), SamplingParams(temperature=-1), "temperature"),
        ({"prompt": 3}, seeded(), "prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    run: Run, prompt: Any, params: SamplingParams, param: str
) -> None:
    async def main(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await llm.add_request("r", prompt, params)
        assert caught.value.param == param
        with pytest.raises(InvalidRequestError):
            await anext(llm.generate(prompt, params, "r"))

    run(main)


def test_what_the_core_refuses_is_raised_to_its_reader_alone(run: Run) -> None:
    """As if the front end had overlooked something."""

    async def main(llm: AsyncLLM) -> RequestOutput:
        good = asyncio.create_task(last_of(llm.generate(ids(1), seeded(30), "good")))
        await asyncio.sleep(0)
        llm.input_processor.vocab_size, before = 1000, llm.input_processor.vocab_size
        try:
            with pytest.raises(InvalidRequestError, match="token id") as caught:
                await last_of(llm.generate(ids(999), seeded(n=2), "bad"))
        finally:
            llm.input_processor.vocab_size = before
        assert caught.value.param == "prompt"
        return await good

    assert run(main).outputs[0].token_ids == oracle([1], 30, [])


def test_abort_by_id_ends_the_stream_with_its_text(run: Run) -> None:
    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate(ids(1), seeded(300), "r"):
            outputs.append(output)
            if len(outputs) == 2:
                await llm.abort(["r", "nobody"])
        return outputs

    last = run(main)[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    tokens = last.outputs[0].token_ids
    assert tokens == oracle([1], 300, [])[: len(tokens)]


def test_the_same_id_twice_is_two_requests(run: Run) -> None:
    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(
            *[last_of(llm.generate(ids(i), seeded(10), "same")) for i in (1, 2)]
        )

    assert [o.outputs[0].token_ids for o in run(main)] == [oracle([i], 10, []) for i in (1, 2)]


def test_long_text_does_not_hold_up_the_event_loop(run: Run, monkeypatch: Any) -> None:
    """It is tokenised on another thread."""

    async def main(llm: AsyncLLM) -> int:
        ticks = 0

        def slow(*args: Any, **kwargs: Any) -> Any:
            end = time.monotonic() + PATIENCE
            while ticks < 5:
                assert time.monotonic() < end
                time.sleep(0.001)
            raise InvalidRequestError("read")

        monkeypatch.setattr(llm.input_processor, "process", slow)
        adding = asyncio.create_task(llm.add_request("r", "word " * 2000, seeded()))
        while not adding.done():
            ticks += 1
            await asyncio.sleep(0.001)
        with pytest.raises(InvalidRequestError, match="read"):
            await adding
        return ticks

    assert run(main) >= 5


def test_five_hundred_opened_and_cut_at_once_leave_no_block_behind(run: Run) -> None:
    async def main(llm: AsyncLLM) -> None:
        async def open_and_cut(i: int) -> None:
            stream = llm.generate(ids(*range(i % 50 + 1)), seeded(200), f"r{i}")
            if i % 3:
                await anext(stream)
            await stream.aclose()

        watcher = Watcher()
        llm.stats_listeners.append(watcher)
        await llm.reset_prefix_cache()
        tasks = [asyncio.create_task(open_and_cut(i)) for i in range(500)]
        await asyncio.sleep(0.05)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert llm.num_unfinished_requests == 0
        assert await llm.reset_prefix_cache()  # False if any block were held
        await last_of(llm.generate(ids(5), seeded(2), "next"))
        await until(lambda: watcher.newest().kv_cache_usage == 0)
        # The next request can have all the blocks there are.
        whole = min(MAX_MODEL_LEN, (NUM_BLOCKS - 1) * BLOCK_SIZE) - 1
        last = await last_of(llm.generate(ids(*[3] * whole), seeded(1), "whole"))
        assert last.outputs[0].token_ids == oracle([3] * whole, 1, [])
        llm.stats_listeners.clear()

    run(main)


class Watcher:
    """A StatsListener that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[tuple[SchedulerStats | None, IterationStats]] = []
        self.finished: list[FinishedRequestStats] = []

    def on_step(self, scheduler_stats: SchedulerStats | None, iteration: IterationStats) -> None:
        self.steps.append((scheduler_stats, iteration))

    def on_finished(self, request: FinishedRequestStats) -> None:
        self.finished.append(request)

    def newest(self) -> SchedulerStats:
        stats = [stats for stats, _ in self.steps if stats is not None]
        return stats[-1]


def test_listeners_are_told_of_steps_and_ends(run: Run) -> None:
    async def main(llm: AsyncLLM) -> Watcher:
        watcher = Watcher()
        await llm.reset_prefix_cache()
        llm.stats_listeners.append(watcher)
        prompt = list(range(9))
        await last_of(llm.generate(ids(*prompt), seeded(7), "first"))
        await last_of(llm.generate(ids(*prompt), seeded(7), "again"))
        await last_of(llm.generate(ids(1), seeded(4, n=2), "second"))
        stream = await llm.add_request("third", ids(1), seeded(300))
        await anext(stream)
        stream.abort()
        llm.stats_listeners.remove(watcher)
        return watcher

    watcher = run(main)
    first, again, second, also_second, third = watcher.finished
    assert (first.request_id, first.finish_reason) == ("first", FinishReason.LENGTH)
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (9, 0)
    assert (first.num_generation_tokens, first.max_tokens, first.n) == (7, 7, 1)
    assert 0 < first.time_to_first_token <= first.e2e_latency
    assert 0 <= first.queued_time <= first.e2e_latency
    assert 0 < first.prefill_time <= first.e2e_latency
    assert 0 < first.decode_time <= first.inference_time <= first.e2e_latency
    assert first.time_per_output_token == pytest.approx(first.decode_time / 6)
    assert again.num_cached_tokens == 8
    assert {second.index, also_second.index} == {0, 1}
    assert [second.is_last, also_second.is_last] == [False, True]
    assert third.finish_reason is FinishReason.ABORT
    iterations = [iteration for _, iteration in watcher.steps]
    assert sum(len(each.time_to_first_tokens) for each in iterations) == 5
    assert sum(each.num_generation_tokens for each in iterations) == sum(
        each.num_generation_tokens for each in watcher.finished
    )
    assert sum(each.num_prompt_tokens for each in iterations) == 9 + 9 + 1 + 1 + 1
    assert all(iteration.timestamp >= iteration.core_timestamp > 0 for iteration in iterations)


def test_the_core_s_controls(run: Run) -> None:
    async def main(llm: AsyncLLM) -> None:
        await llm.pause("keep")
        stream = await llm.add_request("r", ids(4), seeded(5))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.1)
        await llm.check_health()  # paused is not hung
        await llm.resume()
        assert (await last_of(stream)).outputs[0].token_ids == oracle([4], 5, [])
        assert await llm.reset_prefix_cache()

    run(main)


def test_a_core_that_dies_between_two_sequences_of_a_request(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(llm: AsyncLLM) -> None:
        send, sent = llm._client.add_request, 0

        def send_one(request: EngineCoreRequest) -> None:
            nonlocal sent
            sent += 1
            if sent > 1:
                raise EngineDeadError("gone")
            send(request)

        monkeypatch.setattr(llm._client, "add_request", send_one)
        with pytest.raises(EngineDeadError, match="gone"):
            await llm.add_request("r", ids(1), seeded(300, n=3))
        assert llm.num_unfinished_requests == 0
        assert llm._output_processor.num_unfinished_requests == 0
        assert await llm.reset_prefix_cache()  # the first one was aborted

    run(main)


def pid_of(llm: AsyncLLM) -> int:
    """The core's process."""
    assert isinstance(llm._client, core_client.AsyncMPClient)
    return llm._client.pid


# -- ends of all kinds: each with a process of its own ---------------------------------------------


def test_a_core_that_is_killed_ends_every_stream_at_once() -> None:
    async def main() -> None:
        async with ghost_llm(step_seconds=0.01) as llm:
            streams = [await llm.add_request(f"r{i}", ids(i), seeded(300)) for i in range(20)]
            readers = [asyncio.create_task(last_of(stream)) for stream in streams]
            await anext(aiter(await llm.add_request("first", ids(50), seeded(300))))
            call = asyncio.create_task(llm.pause("wait"))
            await asyncio.sleep(0)
            os.kill(pid_of(llm), signal.SIGKILL)
            results = await asyncio.gather(*readers, call, return_exceptions=True)
            assert {type(result) for result in results} == {EngineDeadError}
            assert "SIGKILL" in str(results[0])
            assert llm.errored
            assert not llm.is_running
            assert llm.num_unfinished_requests == 0
            for refused in (
                llm.add_request("late", ids(1), seeded()),
                llm.check_health(),
                llm.reset_prefix_cache(),
            ):
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await refused
            await llm.abort("r0")

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_how_a_core_died_is_the_news_even_if_a_message_to_it_failed_first() -> None:
    async def main() -> None:
        async with ghost_llm(step_seconds=0.01) as llm:
            stream = await llm.add_request("r", ids(1), seeded(300))
            await anext(stream)
            os.kill(pid_of(llm), signal.SIGKILL)
            time.sleep(0.2)  # the sockets know, this event loop does not
            with pytest.raises(EngineDeadError, match="stopped reading"):
                await llm.add_request("late", ids(2), seeded(300))
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await last_of(stream)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await llm.check_health()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_core_that_stops_reading_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_client, "MAX_UNREAD_BYTES", 1 << 16)

    async def main() -> None:
        async with ghost_llm(step_seconds=0.01) as llm:
            stream = await llm.add_request("r", ids(1), seeded(300))
            await anext(stream)
            os.kill(pid_of(llm), signal.SIGSTOP)

            async def fill() -> None:
                for i in range(100_000):
                    await llm.add_request(f"more {i}", ids(*range(50)), seeded(300))

            with pytest.raises(EngineDeadError, match="stopped reading"):
                await fill()
            with pytest.raises(EngineDeadError, match="stopped reading"):
                await last_of(stream)
            assert llm.errored

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_core_that_ends_by_itself_says_how() -> None:
    async def main() -> None:
        async with ghost_llm(die_on_token=13) as llm:
            with pytest.raises(EngineDeadError, match="exit code 7"):
                await last_of(llm.generate(ids(13), seeded(), "r"))

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_request_that_fails_in_a_step_says_why_and_harms_nobody() -> None:
    async def main() -> list[RequestOutput]:
        async with ghost_llm(poison_token=13) as llm:
            return await asyncio.gather(
                *[last_of(llm.generate(ids(i), seeded(20), f"r{i}")) for i in (12, 13, 14)]
            )

    good, bad, also_good = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert good.outputs[0].token_ids == oracle([12], 20, [])
    assert also_good.outputs[0].token_ids == oracle([14], 20, [])
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].stop_reason == "ValueError: poison"


def test_a_core_that_hangs_is_seen_by_check_health() -> None:
    async def main() -> None:
        async with ghost_llm(hang_on_token=13, heartbeat_timeout=1.5) as llm:
            await llm.check_health()
            stream = await llm.add_request("r", ids(13), seeded())

            async def is_ill() -> bool:
                try:
                    await llm.check_health()
                except EngineDeadError as error:
                    return "no progress" in str(error)
                return False

            await until(is_ill)
            os.kill(pid_of(llm), signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await last_of(stream)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_shutdown_aborts_what_runs_and_leaves_nothing() -> None:
    async def main() -> tuple[RequestOutput, int]:
        llm = await start_ghost(Behaviour(step_seconds=0.01))
        process = llm._client._process  # type: ignore[attr-defined]
        stream = await llm.add_request("r", ids(1), seeded(300))
        await anext(stream)
        await llm.shutdown()
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut"):
            await llm.add_request("late", ids(1), seeded())
        with pytest.raises(EngineDeadError, match="shut"):
            await llm.check_health()
        assert not llm.errored
        assert process.exit_words() == "exit code 0"
        assert process.wire.fileno() == -1
        return await last_of(stream), process.pid

    output, pid = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert output.outputs[0].finish_reason == "abort"
    assert not Path(f"/proc/{pid}").exists()


def test_shutdown_with_time_lets_requests_end() -> None:
    async def main() -> RequestOutput:
        llm = await start_ghost(Behaviour(step_seconds=0.005))
        stream = await llm.add_request("r", ids(1), seeded(20))
        ending = asyncio.create_task(llm.shutdown(timeout=PATIENCE))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await llm.add_request("late", ids(1), seeded())
        output = await last_of(stream)
        await ending
        return output

    output = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert output.outputs[0].token_ids == oracle([1], 20, [])


def test_a_second_shutdown_ends_the_first_one_s_patience() -> None:
    async def main() -> RequestOutput:
        llm = await start_ghost(Behaviour(step_seconds=0.05))
        stream = await llm.add_request("r", ids(1), seeded(390))
        patient = asyncio.create_task(llm.shutdown(timeout=3600))
        await asyncio.sleep(0)
        await llm.shutdown()
        await patient
        return await last_of(stream)

    output = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert output.outputs[0].finish_reason == "abort"


def test_the_signals_of_a_terminal_do_not_end_the_core() -> None:
    async def main() -> RequestOutput:
        async with ghost_llm(step_seconds=0.005) as llm:
            stream = await llm.add_request("r", ids(1), seeded(20))
            await anext(stream)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid_of(llm), number)
            return await last_of(stream)

    output = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert output.outputs[0].finish_reason == "length"


def test_what_fails_while_loading_is_raised_here() -> None:
    async def main() -> None:
        with pytest.raises(ModelFileError, match="tensor x: is missing"):
            await start_ghost(Behaviour(fail_to_load=True))

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_what_is_sent_before_the_core_is_ready_is_served() -> None:
    """With two sockets, the news that the core was ready could overtake the way to it: the first
    request of a server was refused, and its core ended as one that had stopped reading."""
    behaviour = Behaviour(load_seconds=0.2)

    class Events:
        def __init__(self) -> None:
            self.ended = asyncio.get_running_loop().create_future()

        def on_outputs(self, outputs: EngineCoreOutputs) -> None:
            if outputs.outputs[-1].finish_reason is not None:
                self.ended.set_result(None)

        def on_refused(self, request_id: str, error: InvalidRequestError) -> None:
            self.ended.set_exception(error)

        def on_live(self, update: LiveUpdate) -> None:
            raise AssertionError("nobody watches")

        def on_dead(self, error: EngineDeadError) -> None:
            if not self.ended.done():
                self.ended.set_exception(error)

    async def main() -> None:
        events = Events()
        client = AsyncMPClient(CoreProcess(lambda *fds: ghost_command(behaviour, *fds)))
        client.start(events)
        client.add_request(
            EngineCoreRequest(
                request_id="early",
                prompt_token_ids=[1, 2],
                sampling_params=seeded(4),
                eos_token_id=None,
                arrival_time=0.0,
            )
        )
        assert not client._ready.done()
        await client.wait_until_ready()
        await events.ended
        await client.shutdown()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


PARENT = """
import asyncio, sys, time
sys.path.insert(0, {tests!r})
from helpers.ghost_llm import ghost_llm

async def main():
    async with ghost_llm(step_seconds={step_seconds}, hang_on_token=13) as llm:
        from twostep import SamplingParams
        params = SamplingParams(seed=0, ignore_eos=True, max_tokens=300)
        stream = await llm.add_request("r", {{"prompt_token_ids": [{token}]}}, params)
        if {token} != 13:
            await anext(stream)
        print(llm._client.pid, flush=True)
        time.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("token", [1, 13], ids=["busy", "hung"])
def test_a_parent_that_is_killed_takes_its_core_with_it(token: int) -> None:
    code = PARENT.format(tests=TESTS, step_seconds=0.01, token=token)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        core = int(parent.stdout.readline())
        assert Path(f"/proc/{core}").exists()
        parent.kill()
    end = time.monotonic() + 2.0
    while is_alive(core):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for init to look does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
