"""Watching an engine whose core is a process of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.ghost_llm import ghost_llm, last_of

from twostep.contracts.errors import EngineDeadError
from twostep.contracts.live_view import LiveUpdate
from twostep.contracts.sampling import SamplingParams
from twostep.frontend.async_llm import AsyncLLM
from twostep.frontend.live_watch import MAX_UNREAD, LiveWatch

PATIENCE = 40.0


def update(time: float) -> LiveUpdate:
    return LiveUpdate(
        time=time, token_budget=16, max_num_seqs=4, plans=[], spans=[], events=[], running=[],
        waiting=[], num_waiting=0, kv_cache_usage=0.0, prefix_cache_queries=0,
        prefix_cache_hits=0, num_preemptions=0,
    )  # fmt: skip


async def ask(llm: AsyncLLM, name: str, tokens: int = 12) -> Any:
    params = SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=tokens)
    return await last_of(llm.generate({"prompt_token_ids": [3, 4, 5]}, params, name))


def is_of(core_id: str, name: str) -> bool:
    """The core calls a request by the user's name and some letters."""
    return core_id.rpartition("-")[0] == name


async def read_until_ended(watch: LiveWatch, name: str) -> list[LiveUpdate]:
    seen: list[LiveUpdate] = []
    async for each in watch:
        seen.append(each)
        if any(is_of(event.request_id, name) and event.event == "length" for event in each.events):
            return seen
    raise AssertionError


def test_watch_a_request_from_arrival_to_end() -> None:
    async def main() -> None:
        async with ghost_llm() as llm, asyncio.timeout(PATIENCE):
            with llm.watch() as watch:
                first = await anext(watch)
                assert first.blocks is not None
                assert first.running == []
                answer, seen = await asyncio.gather(ask(llm, "r"), read_until_ended(watch, "r"))
            assert answer.finished
            planned = [part for each in seen for plan in each.plans for part in plan.planned]
            assert all(is_of(part.request_id, "r") for part in planned)
            assert sum(part.num_tokens for part in planned) == 3 + 11
            # Nobody watches any more: the answer is the same, and nothing is sent.
            assert (await ask(llm, "again")).outputs[0].token_ids == answer.outputs[0].token_ids

    asyncio.run(main())


def test_who_comes_later_sees_the_whole_picture_and_who_goes_takes_nothing_away() -> None:
    async def main() -> None:
        async with ghost_llm() as llm, asyncio.timeout(PATIENCE):
            with llm.watch() as one:
                await anext(one)
                with llm.watch() as two:
                    assert (await anext(two)).blocks is not None
                await asyncio.gather(ask(llm, "r"), read_until_ended(one, "r"))

    asyncio.run(main())


def test_the_end_of_the_engine_ends_the_watch() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            async with ghost_llm() as llm:
                with llm.watch() as watch:
                    await anext(watch)
                    await llm.shutdown()
                    with pytest.raises(EngineDeadError):
                        await read_until_ended(watch, "nobody")
            with pytest.raises(EngineDeadError), llm.watch():
                pass

    asyncio.run(main())


def test_a_slow_watcher_gets_the_newest_and_is_told_what_it_missed() -> None:
    async def main() -> None:
        watch = LiveWatch()
        for time in range(MAX_UNREAD + 7):
            watch.put(update(time))
        got = [await anext(watch) for _ in range(MAX_UNREAD)]
        assert [each.time for each in got] == list(range(7, MAX_UNREAD + 7))
        assert [each.num_dropped for each in got] == [7] + [0] * (MAX_UNREAD - 1)

    asyncio.run(main())
