"""The stream: order, joining, failures, and who may need Python's lock."""

from __future__ import annotations

import numpy as np
import pytest

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
