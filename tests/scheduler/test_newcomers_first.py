"""While a crowd waits for its first tokens, the few who stream wait for it once."""

from __future__ import annotations

from planning_helpers import add, check, make_scheduler, run_step

from twostep.scheduler.scheduler import Scheduler


def with_streams(num_streams: int, **config: object) -> Scheduler:
    """So many requests that have more than their first token."""
    scheduler = make_scheduler(**{"budget": 100, "prefill_burst_tokens": 8192} | config)
    for i in range(num_streams):
        add(scheduler, f"s{i}", 10, 50)
        run_step(scheduler)
        run_step(scheduler)
    return scheduler


def crowd(scheduler: Scheduler, size: int, length: int = 60) -> None:
    for i in range(size):
        add(scheduler, f"c{i}", length, 50)


def test_prompts_of_a_crowd_go_first_and_streams_take_what_is_left() -> None:
    scheduler = with_streams(1)
    crowd(scheduler, 4)
    plans = [run_step(scheduler)[0].num_scheduled_tokens for _ in range(3)]
    assert plans == [
        {"c0": 60, "c1": 40},
        {"c1": 20, "c2": 60, "c3": 20},
        {"s0": 1, "c0": 1, "c1": 1, "c2": 1, "c3": 40},
    ]
    assert scheduler.requests["s0"].num_tokens == 13
    check(scheduler)


def test_a_step_of_a_crowd_may_be_larger() -> None:
    """Streams wait for the same prompts either way. Any other step has the common budget."""
    scheduler = with_streams(1, crowd_step_tokens=220)
    crowd(scheduler, 4)
    plans = [run_step(scheduler)[0].num_scheduled_tokens for _ in range(3)]
    assert plans == [
        {"c0": 60, "c1": 60, "c2": 60, "c3": 40},
        {"s0": 1, "c0": 1, "c1": 1, "c2": 1, "c3": 20},
        {"s0": 1, "c0": 1, "c1": 1, "c2": 1, "c3": 1},
    ]
    add(scheduler, "long", 2000, 50)
    assert run_step(scheduler)[0].num_scheduled_tokens["long"] == 95
    check(scheduler)


def test_a_backlog_beside_many_streams_gets_half_a_step_of_a_crowd() -> None:
    scheduler = with_streams(2, crowd_step_tokens=360)
    crowd(scheduler, 4)
    assert run_step(scheduler)[0].num_scheduled_tokens == {
        "s0": 1, "s1": 1, "c0": 60, "c1": 60, "c2": 58,
    }  # fmt: skip
    check(scheduler)


def test_a_step_is_no_larger_than_its_backlog() -> None:
    scheduler = with_streams(2, crowd_step_tokens=360)
    crowd(scheduler, 2)
    assert run_step(scheduler)[0].num_scheduled_tokens == {"s0": 1, "s1": 1, "c0": 60, "c1": 60}


def test_a_long_prompt_is_no_backlog() -> None:
    scheduler = with_streams(2, crowd_step_tokens=360)
    add(scheduler, "long", 2000, 50)
    crowd(scheduler, 4)
    assert run_step(scheduler)[0].num_scheduled_tokens == {"s0": 1, "s1": 1, "long": 98}


def test_a_long_prompt_gets_no_more_for_those_behind_it() -> None:
    scheduler = with_streams(2, crowd_step_tokens=360)
    add(scheduler, "long", 2000, 50)
    run_step(scheduler)
    crowd(scheduler, 4)
    assert run_step(scheduler)[0].num_scheduled_tokens == {"s0": 1, "s1": 1, "long": 98}


def test_one_short_prompt_alone_is_one_step() -> None:
    scheduler = with_streams(0, crowd_step_tokens=220)
    crowd(scheduler, 1, length=200)
    assert run_step(scheduler)[0].num_scheduled_tokens == {"c0": 200}


def test_a_smaller_step_of_a_crowd_is_the_common_one() -> None:
    scheduler = with_streams(0, crowd_step_tokens=20)
    crowd(scheduler, 4)
    assert run_step(scheduler)[0].num_scheduled_tokens == {"c0": 60, "c1": 40}


def test_running_requests_come_before_new_ones_in_a_plan() -> None:
    """The runner counts on it, whoever was chosen first."""
    scheduler = with_streams(1)
    crowd(scheduler, 4, length=10)
    plan, _ = run_step(scheduler)
    assert list(plan.num_scheduled_tokens.items()) == [
        ("s0", 1), ("c0", 10), ("c1", 10), ("c2", 10), ("c3", 10),
    ]  # fmt: skip


def test_three_newcomers_for_a_stream_are_no_crowd() -> None:
    scheduler = with_streams(1)
    crowd(scheduler, 3)
    assert run_step(scheduler)[0].num_scheduled_tokens == {"s0": 1, "c0": 60, "c1": 39}


def test_who_got_a_first_token_in_the_burst_is_of_the_crowd_still() -> None:
    """Else the second half of a crowd would find the first half in its way."""
    scheduler = with_streams(0)
    crowd(scheduler, 10)
    plans = [run_step(scheduler)[0].num_scheduled_tokens for _ in range(6)]
    assert all(sum(plan.values()) == 100 and 1 not in plan.values() for plan in plans)
    assert len(scheduler.running) == 10
    assert not scheduler.waiting


def test_many_do_not_wait_for_one_long_prompt() -> None:
    """It came in the middle of a crowd, and is not of it."""
    scheduler = with_streams(0)
    crowd(scheduler, 3)
    add(scheduler, "long", 2000, 50)
    plans = [run_step(scheduler)[0].num_scheduled_tokens for _ in range(4)]
    assert plans[:2] == [{"c0": 60, "c1": 40}, {"c0": 1, "c1": 20, "c2": 60, "long": 19}]
    assert plans[2] == {"c0": 1, "c1": 1, "c2": 1, "long": 97}
    assert plans[3] == {"c0": 1, "c1": 1, "c2": 1, "long": 97}


def test_a_crowd_behind_a_long_prompt_is_none() -> None:
    """The long prompt would be first of all: streams would wait for one request."""
    scheduler = with_streams(1)
    add(scheduler, "long", 2000, 50)
    run_step(scheduler)
    crowd(scheduler, 20)
    for _ in range(3):
        assert run_step(scheduler)[0].num_scheduled_tokens == {"s0": 1, "long": 99}


def test_who_streams_already_is_not_of_the_next_crowd() -> None:
    """A first token long ago is no reason to wait again."""
    scheduler = with_streams(0)
    crowd(scheduler, 3)
    for _ in range(3):
        run_step(scheduler)
    add(scheduler, "late", 200, 50)
    assert run_step(scheduler)[0].num_scheduled_tokens == {"c0": 1, "c1": 1, "c2": 1, "late": 97}


def test_a_queue_that_never_ends_is_no_crowd() -> None:
    scheduler = with_streams(9)
    crowd(scheduler, 1000)
    assert "s0" in run_step(scheduler)[0].num_scheduled_tokens


def test_a_burst_ends() -> None:
    """Newcomers who keep coming do not starve the streams."""
    scheduler = with_streams(1, prefill_burst_tokens=250)
    crowd(scheduler, 30)
    streamed = ["s0" in run_step(scheduler)[0].num_scheduled_tokens for _ in range(5)]
    assert streamed == [False, False, False, True, True]


def test_a_crowd_that_cannot_start_holds_nobody_up() -> None:
    """No place to run: the streams go on."""
    scheduler = with_streams(2, max_num_seqs=2)
    crowd(scheduler, 20)
    assert run_step(scheduler)[0].num_scheduled_tokens == {"s0": 1, "s1": 1}


def test_nobody_is_started_and_preempted_in_one_step() -> None:
    """The crowd has the last blocks: the stream waits for a step of its own."""
    scheduler = with_streams(1, num_blocks=1 + 5, max_model_len=80, full_sequence_must_fit=False)
    for _ in range(5):  # to the end of its block
        run_step(scheduler)
    crowd(scheduler, 4, length=16)
    first, _ = run_step(scheduler)
    assert first.num_scheduled_tokens == {f"c{i}": 16 for i in range(4)}
    assert not first.preempted_req_ids
    second, _ = run_step(scheduler)
    assert second.num_scheduled_tokens["s0"] == 1
    assert second.preempted_req_ids
    check(scheduler)


def test_priorities_say_who_goes_first() -> None:
    scheduler = with_streams(1, policy="priority")
    crowd(scheduler, 8)
    assert "s0" in run_step(scheduler)[0].num_scheduled_tokens


def test_zero_means_never() -> None:
    scheduler = with_streams(1, prefill_burst_tokens=0)
    crowd(scheduler, 8)
    assert "s0" in run_step(scheduler)[0].num_scheduled_tokens
