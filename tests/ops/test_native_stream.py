"""The stream: order, joining, failures, and who may need Python's lock."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.time_slices import time_slice, time_slices

from twostep import _native as native


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make_step(device: object, table: object | None = None, token: int = 0) -> object:
    step = native.make_step(
        device, 1, ints(0, 1), ints(1), ints(0), ints(0), ints(0), np.zeros((1, 1), np.int32), 16
    )
    if table is not None:
        step.stage_tokens(table, 0, 0, ints(token))
    return step


@pytest.mark.parametrize(("threads", "joins"), [(1, True), (2, True), (3, True), (2, False)])
def test_launches_run_in_order_and_once(threads: int, joins: bool) -> None:
    """Each launch doubles what the one before left; a lost or repeated one would show."""
    device = native.make_device()
    x = native.Rows(64, 40)
    plan = native.Plan()
    native.add_add(plan, device, x, x)
    stream = native.Stream(threads, joins)
    step = native.make_step(
        device,
        40,
        ints(0, 40),
        ints(40),
        ints(0),
        ints(39),
        ints(0),
        np.zeros((1, 3), np.int32),
        16,
    )
    for rounds in range(1, 60):
        x.numpy()[:] = 1.0
        for _ in range(rounds):
            ticket = stream.launch(plan, step)
        stream.wait(ticket)
        assert stream.done(ticket)
        assert (x.numpy() == 2.0**rounds).all()


@pytest.mark.parametrize(("threads", "joins"), [(1, True), (2, True), (3, True), (3, False)])
def test_ops_of_one_chunk_ride_behind_the_op_before_them(threads: int, joins: bool) -> None:
    """x doubles (five chunks), its first row is copied and the copy is normed (one chunk each), x
    doubles again: the copy sees the whole of the first doubling and nothing of the second."""
    device = native.make_device()
    width = 16384
    x, once, twice = native.Rows(width, 40), native.Rows(width, 1), native.Rows(width, 1)
    ones = native.Vector(np.ones(width, np.float32))
    plan = native.Plan()
    native.add_gather(plan, x, once)  # the first op has none to ride behind
    native.add_add(plan, device, x, x)
    native.add_gather(plan, x, twice)
    native.add_rms_norm(plan, device, twice, ones, 0.0, native.RowSet.Logits, once, [])
    native.add_add(plan, device, x, x)
    stream = native.Stream(threads, joins)
    stream.set_profile(True)
    step = native.make_step(
        device, 40, ints(0, 40), ints(40), ints(0), ints(0), ints(0), np.zeros((1, 3), np.int32), 16
    )
    x.numpy()[:] = 1.0
    for number in range(25):
        once.numpy()[:] = twice.numpy()[:] = 0.0
        stream.wait(stream.launch(plan, step))
        assert (x.numpy() == 4.0 ** (number + 1)).all()
        assert (twice.numpy() == 2 * 4.0**number).all()
        assert (once.numpy() == 1.0).all(), "the rider behind a rider reads what that one wrote"
    assert {name: runs for name, (_, runs) in stream.profile().items()} == {
        "gather": 50,
        "add": 50,
        "rms_norm": 25,
    }


def test_a_rider_that_fails_fails_its_launch() -> None:
    device = native.make_device()
    cache = native.KVCache(device, 1, 1, 16, 4, dtype="fp32")
    x, qkv, q = native.Rows(64, 40), native.Rows(3 * 16, 1), native.Rows(16, 1)
    table = native.RopeTable(np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32))
    plan = native.Plan()
    native.add_add(plan, device, x, x)
    native.add_rope_cache(plan, device, cache, 0, qkv, q, table, num_heads=1, scale=1.0)
    native.add_add(plan, device, x, x)
    bad = native.make_step(
        device, 1, ints(0, 1), ints(1), ints(0), ints(), ints(), ints(99)[None], 16
    )
    stream = native.Stream(2)
    x.numpy()[:] = 1.0
    with pytest.raises(RuntimeError, match="rope_cache: block id outside the cache"):
        stream.wait(stream.launch(plan, bad))
    assert x.numpy()[0, 0] == 2.0, "what is behind a failure does not run"


def test_a_worker_never_needs_the_interpreter_lock() -> None:
    """Found as a deadlock: the worker that retired a launch dropped its step, and with it the last
    reference to a Python object, while it held the stream's mutex that ``launch`` waited for."""
    device = native.make_device()
    plan = native.Plan()
    native.add_apply_staged(plan)
    stream = native.Stream(2, False)
    for number in range(3000):
        table = native.TokenTable(1, 4)  # dies with the step
        stream.launch(plan, make_step(device, table, number))
    stream.wait(stream.last_ticket)


def test_staged_writes_happen_in_stream_order() -> None:
    device = native.make_device()
    plan = native.Plan()
    native.add_apply_staged(plan)
    table = native.TokenTable(1, 4)
    stream = native.Stream(1)  # nothing runs before the wait
    tickets = [stream.launch(plan, make_step(device, table, token)) for token in range(5)]
    stream.wait(tickets[2])
    assert table.row(0, 1) == [2]
    stream.wait(tickets[4])
    assert table.row(0, 1) == [4]


def test_waiting_for_what_was_never_launched_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such launch"):
        native.Stream(1).wait(1)


@pytest.mark.parametrize(("threads", "joins"), [(1, True), (2, True), (2, False)])
def test_spans_of_launches(threads: int, joins: bool) -> None:
    """Each timed launch has one span; spans are in order, never overlap, and lie between its
    launch and the end of the wait for it, by Python's own clock."""
    device = native.make_device()
    plan, idle = native.Plan(), native.Plan()
    x = native.Rows(64, 1)
    native.add_add(plan, device, x, x)
    stream = native.Stream(threads, joins)
    stream.wait(stream.launch(plan, make_step(device)))
    assert stream.take_spans(0, stream.last_ticket) == [], "nobody asked for times"
    stream.set_timing(True)
    before = time.monotonic()
    first = stream.launch(plan, make_step(device))
    for _ in range(20):
        stream.launch(plan, make_step(device))
    last = stream.launch(idle, make_step(device))
    stream.wait(last)
    after = time.monotonic()
    spans = stream.take_spans(first + 1, last)
    assert [ticket for ticket, _, _ in spans] == list(range(first + 1, last + 1))
    edges = [edge for _, start, end in spans for edge in (start, end)]
    assert edges == sorted(edges)
    assert before <= edges[0]
    assert edges[-1] <= after
    assert all(start < end for _, start, end in spans[:-1])
    assert stream.take_spans(0, last) == [], "told once"
    stream.set_timing(False)
    stream.wait(stream.launch(plan, make_step(device)))
    assert stream.take_spans(0, stream.last_ticket) == []


def test_two_failures_of_one_step_are_told_once() -> None:
    """The second one must not be blamed on the step that follows."""
    device = native.make_device()
    cache = native.KVCache(device, 1, 1, 16, 4, dtype="fp32")
    qkv, q = native.Rows(3 * 16, 1), native.Rows(16, 1)
    table = native.RopeTable(np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32))
    plan = native.Plan()
    native.add_rope_cache(plan, device, cache, 0, qkv, q, table, num_heads=1, scale=1.0)
    bad = native.make_step(
        device, 1, ints(0, 1), ints(1), ints(0), ints(), ints(), ints(99)[None], 16
    )
    stream = native.Stream(1)
    stream.launch(plan, bad)
    second = stream.launch(plan, bad)
    good = stream.launch(plan, make_step(device))
    with pytest.raises(RuntimeError, match="block id outside the cache"):
        stream.wait(second)
    stream.wait(good)


def state_of(thread: str) -> str:
    """R running, S asleep; see proc(5)."""
    stat = Path(f"/proc/self/task/{thread}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


@pytest.mark.parametrize("joins", [True, False])
def test_idle_workers_sleep(joins: bool) -> None:
    """Before the first launch and after the last one; and they wake up for the next."""
    tasks = Path("/proc/self/task")
    before = {path.name for path in tasks.iterdir()}
    device = native.make_device()
    x = native.Rows(64, 40)
    plan = native.Plan()
    native.add_add(plan, device, x, x)
    stream = native.Stream(3, joins)
    workers = {path.name for path in tasks.iterdir()} - before
    assert len(workers) == 3 - joins
    for rounds in range(3):
        while any(state_of(worker) != "S" for worker in workers):
            time.sleep(0.001)  # a worker that never sleeps ends in pytest's timeout
        x.numpy()[:] = 1.0
        stream.wait(stream.launch(plan, make_step(device)))
        assert x.numpy()[0, 0] == 2.0, rounds


def test_whoever_wakes_up_runs_before_the_threads_that_compute() -> None:
    """Found as 3 ms between a token and its client, on a machine whose cores all computed."""
    usual = time_slice()
    if usual == 0:
        pytest.skip("threads choose their time slices from Linux 6.12 on")
    before = set(time_slices(os.getpid()))
    stream = native.Stream(3)
    plan = native.Plan()
    device = native.make_device()
    native.add_apply_staged(plan)
    slices = time_slices(os.getpid())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and sum(n > usual for n in slices.values()) < 2:
        stream.wait(stream.launch(plan, make_step(device)))
        slices = time_slices(os.getpid())
    started = {tid: each for tid, each in slices.items() if tid not in before}
    assert len(started) == 2
    assert all(each > 2 * usual for each in started.values())
    assert time_slice() == usual, "the thread that waits is the user's own"
