"""A reader that is slower than the engine loses nothing and keeps little."""

from __future__ import annotations

import asyncio

import pytest

from twostep.contracts.errors import EngineDeadError
from twostep.contracts.results import CompletionOutput, RequestOutput
from twostep.contracts.sampling import RequestOutputKind
from twostep.frontend.request_stream import RequestStream


def output(text: str, *ids: int, finished: bool = False, index: int = 0) -> RequestOutput:
    reason = "stop" if finished else None
    completion = CompletionOutput(index=index, text=text, token_ids=[*ids], finish_reason=reason)
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1], outputs=[completion], finished=finished
    )


def make(kind: RequestOutputKind = RequestOutputKind.DELTA) -> tuple[RequestStream, list[str]]:
    aborted: list[str] = []

    def abort(stream: RequestStream) -> None:
        aborted.append(stream.request_id)
        stream.put(output("", finished=True))

    return RequestStream("r", ["r-0"], kind, abort), aborted


async def read(stream: RequestStream) -> list[RequestOutput]:
    return [each async for each in stream]


def test_a_fast_reader_sees_every_output() -> None:
    async def main() -> list[str]:
        stream, _ = make()
        reader = asyncio.create_task(read(stream))
        for text in ("a", "b", "c"):
            await asyncio.sleep(0)
            stream.put(output(text, 1))
            await asyncio.sleep(0)
        stream.put(output("d", 2, finished=True))
        return [each.outputs[0].text for each in await reader]

    assert asyncio.run(main()) == ["a", "b", "c", "d"]


def test_a_slow_reader_gets_deltas_merged() -> None:
    async def main() -> list[RequestOutput]:
        stream, _ = make()
        for i in range(100):
            stream.put(output(f"{i} ", i))
        first = await anext(stream)
        stream.put(output("end", 100, finished=True))
        return [first, *await read(stream)]

    first, last = asyncio.run(main())
    assert first.outputs[0].text == "".join(f"{i} " for i in range(100))
    assert first.outputs[0].token_ids == list(range(100))
    assert not first.finished
    assert (last.outputs[0].text, last.outputs[0].token_ids, last.finished) == ("end", [100], True)


def test_a_slow_reader_gets_the_newest_of_cumulative_outputs() -> None:
    async def main() -> list[RequestOutput]:
        stream, _ = make(RequestOutputKind.CUMULATIVE)
        stream.put(output("a", 1))
        stream.put(output("ab", 1, 2))
        stream.put(output("abc", 1, 2, 3, finished=True))
        return await read(stream)

    [only] = asyncio.run(main())
    assert (only.outputs[0].text, only.finished) == ("abc", True)


def test_an_error_comes_behind_what_is_unread_and_comes_again() -> None:
    async def main() -> str:
        stream, _ = make()
        stream.put(output("a", 1))
        stream.fail(EngineDeadError("gone"))
        stream.put(output("b", 2))
        text = (await anext(stream)).outputs[0].text
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await anext(stream)
        return text

    assert asyncio.run(main()) == "a"


def test_an_error_wakes_a_reader() -> None:
    async def main() -> None:
        stream, _ = make()
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        stream.fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await reader

    asyncio.run(main())


def test_abort_is_told_once_and_only_before_the_end() -> None:
    async def main() -> tuple[list[str], list[RequestOutput]]:
        stream, aborted = make()
        stream.put(output("a", 1))
        stream.abort()
        stream.abort()
        outputs = await read(stream)
        stream.abort()
        return aborted, outputs

    aborted, [merged] = asyncio.run(main())
    assert aborted == ["r"]
    assert (merged.outputs[0].text, merged.finished) == ("a", True)


def test_a_reader_that_was_cancelled_can_read_on() -> None:
    async def main() -> str:
        stream, _ = make()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        stream.put(output("late", 1, finished=True))
        return (await anext(stream)).outputs[0].text

    assert asyncio.run(main()) == "late"
