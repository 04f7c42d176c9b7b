"""What a watcher of the running engine is sent."""

from __future__ import annotations

import msgspec
import pytest
from helpers.toy_engine import Toy, ToyCompiler, make_request, make_toy, run_load

from twostep.contracts.live_view import LiveUpdate
from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.engine.core import EngineCore
from twostep.engine.live_view import MAX_CELLS, LiveView, block_map


def watch(toy: Toy, core: EngineCore, takes: bool = True) -> list[LiveUpdate]:
    updates: list[LiveUpdate] = []

    def send(update: LiveUpdate) -> bool:
        if takes:
            updates.append(update)
        return takes

    toy.executor.time_device()
    core.observer = LiveView(core.scheduler, toy.clock, send)
    return updates


def drain(core: EngineCore) -> None:
    while core.has_work():
        core.step_fn()


def endless(request_id: str, num_tokens: int) -> EngineCoreRequest:
    request = make_request(request_id, list(range(10, 20)), num_tokens)
    return msgspec.structs.replace(request, eos_token_id=None)


def test_the_budget_is_that_of_the_largest_step() -> None:
    """Pages draw steps in proportion to it: one of a crowd must fit."""
    toy = make_toy(prefill_burst_tokens=1000, crowd_step_tokens=30)
    core = toy.core(None)
    updates = watch(toy, core)
    core.add_request(make_request("a", list(range(10, 35)), 3))
    drain(core)
    plans = [plan for update in updates for plan in update.plans]
    assert plans[0].num_tokens == 25  # more than the common 16
    assert {update.token_budget for update in updates} == {30}


def test_a_life_from_arrival_to_end() -> None:
    toy = make_toy()
    core = toy.core(None)
    updates = watch(toy, core)
    core.add_request(make_request("a", list(range(10, 40)), 3))
    drain(core)
    events = [event for update in updates for event in update.events]
    assert [(event.event, event.num_tokens) for event in events] == [("arrived", 30), ("length", 0)]
    plans = [plan for update in updates for plan in update.plans]
    parts = [part for plan in plans for part in plan.planned]
    assert {part.request_id for part in parts} == {"a"}
    kinds = [part.kind for part in parts]
    assert kinds[:2] == ["new", "prefill"]
    assert set(kinds[2:]) == {"decode"}
    assert sum(part.num_tokens for part in parts) == 30 + 2
    assert [part.num_computed_tokens for part in parts][:2] == [0, parts[0].num_tokens]
    assert sum(plan.num_new_blocks for plan in plans) == -(-32 // toy.cache_config.block_size)
    lanes = {span.lane for update in updates for span in update.spans}
    assert {"planning", "launch", "wait", "update", "device"} <= lanes
    assert updates[-1].running == []
    assert updates[-1].kv_cache_usage == 0.0


def test_what_waits_is_told_in_order() -> None:
    toy = make_toy()
    core = toy.core(None)
    updates = watch(toy, core)
    for name in "abcdefghij":
        core.add_request(make_request(name, [10, 11, 12], 40))
    core.step_fn()
    core.observer.flush()  # type: ignore[union-attr]
    last = updates[-1]
    assert last.running + last.waiting == list("abcdefghij")
    assert last.num_waiting == len(last.waiting)


def test_the_map_shows_who_holds_what() -> None:
    toy = make_toy(num_blocks=40)
    core = toy.core(None)
    prompt = list(range(10, 26))
    core.add_request(make_request("first", prompt, 2))
    drain(core)
    cached = block_map(core.scheduler)
    assert {state for state, _, _ in cached.runs} == {0, 1}
    core.add_request(make_request("again", prompt, 20))
    core.add_request(make_request("twin", prompt, 20))
    core.step_fn()
    core.step_fn()
    shown = block_map(core.scheduler)
    assert sum(count for _, _, count in shown.runs) == shown.num_blocks
    assert {state for state, _, _ in shown.runs} >= {2, 3}
    held = [owner for state, owner, count in shown.runs for _ in range(count) if state in (2, 3)]
    assert {shown.owners[owner] for owner in held} <= {"again", "twin"}


def test_a_large_cache_is_drawn_coarsely() -> None:
    toy = make_toy(num_blocks=3 * MAX_CELLS)
    shown = block_map(toy.core(None).scheduler)
    assert shown.cell == 3
    assert shown.runs == [(0, -1, MAX_CELLS)]


def test_updates_come_at_a_pace() -> None:
    toy = make_toy(num_blocks=200, max_model_len=600)
    core = toy.core(None)
    updates = watch(toy, core)
    core.add_request(endless("a", 400))
    drain(core)
    times = [update.time for update in updates]
    steps = sum(len(update.plans) for update in updates)
    assert steps >= 400
    assert len(updates) < steps / 2
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert min(gaps[:-1]) >= 0.1
    assert 1 < sum(update.blocks is not None for update in updates) < len(updates)


def test_a_slow_watcher_is_told_what_it_missed() -> None:
    toy = make_toy(num_blocks=200, max_model_len=600)
    core = toy.core(None)
    watch(toy, core, takes=False)
    view = core.observer
    assert isinstance(view, LiveView)
    core.add_request(endless("a", 300))
    drain(core)
    got: list[LiveUpdate] = []
    view._send = lambda update: not got.append(update)  # type: ignore[func-returns-value]
    view.flush()
    view.flush()
    assert got[0].num_dropped > 1
    assert got[1].num_dropped == 0
    assert got[0].plans == []


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_watching_may_begin_and_end_at_any_time(is_async: bool) -> None:
    """With steps in flight, under load, with failures: nothing breaks, and all can be encoded."""
    toy = make_toy(is_async=is_async)
    core = toy.core(None)
    calls = 0
    all_updates: list[LiveUpdate] = []

    schedule = core.scheduler.schedule

    def send(update: LiveUpdate) -> bool:
        all_updates.append(update)
        return True

    def toggle_and_schedule() -> SchedulerOutput:
        nonlocal calls
        calls += 1
        if calls % 9 == 0:
            core.observer = None
        elif calls % 9 == 3:
            toy.executor.time_device()
            core.observer = LiveView(core.scheduler, toy.clock, send)
        return schedule()

    core.scheduler.schedule = toggle_and_schedule  # type: ignore[method-assign]
    run_load(toy, core, seed=3, faults=True, steps=400)
    assert len(all_updates) > 10
    assert any(update.plans for update in all_updates)
    for update in all_updates:
        assert msgspec.json.decode(msgspec.json.encode(update), type=LiveUpdate) == update


def test_watching_may_begin_while_a_plan_waits_for_its_mask(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A watcher who came in between failed the step, and the second one the requests in it."""

    def ends(watched_from: int | None) -> dict[str, str]:
        toy = make_toy()
        core = toy.core(None, ToyCompiler())
        for i in range(8):
            core.add_request(make_request(f"g{i}", [10, 11, 12], 6, grammar=f"grammar {i}"))
        core.add_request(make_request("plain", [20, 21, 22], 6))
        found: dict[str, str] = {}
        steps = 0
        while core.has_work():
            if steps == watched_from:
                watch(toy, core)
            outputs, _ = core.step_fn()
            for news in (outputs or {}).values():
                for output in news.outputs:
                    if output.finish_reason is not None:
                        found[output.request_id] = str(output.finish_reason)
            steps += 1
        return found

    unwatched = ends(None)
    assert "length" in [unwatched[f"g{i}"] for i in range(8)]
    for first in range(30):
        assert ends(first) == unwatched
    assert "failed" not in caplog.text
