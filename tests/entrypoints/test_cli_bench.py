"""``twostep bench scheduler``: shape and meaning of the report, never its figures."""

from __future__ import annotations

import json

import pytest

from twostep.entrypoints.cli import bench_scheduler, main

Capture = pytest.CaptureFixture[str]


def test_json_has_every_case(capsys: Capture) -> None:
    """Both schedulers, every size, and the long prompts with and without decodes."""
    argv = ["bench", "scheduler", "--steps", "8", "--decodes", "1", "3", "--json"]
    assert main.main(argv) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["case"] for row in rows if row["async"]] == [
        "1 decodes",
        "3 decodes",
        "20000-token prompts in chunks, 0 decodes",
        "20000-token prompts in chunks, 64 decodes",
    ]
    assert len(rows) == 8
    for row in rows:
        assert row["schedule_us"] > 0
        assert row["update_us"] > 0
        assert row["p50_us"] > 0


def test_table_for_people(capsys: Capture) -> None:
    """One line for each case."""
    assert main.main(["bench", "scheduler", "--steps", "2", "--decodes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "µs per step" in lines[0]
    assert len(lines) == 7


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_timed_are_full_steps(is_async: bool) -> None:
    """Every timed step plans everybody and gives everybody a token: no idle steps flatter it."""
    scheduler = bench_scheduler.make_scheduler(5, is_async=is_async)
    for number in range(5):
        bench_scheduler.add(scheduler, f"r{number}", 40 + number)
    planned: list[int] = []
    schedule = scheduler.schedule

    def counting():  # type: ignore[no-untyped-def]
        plan = schedule()
        planned.append(plan.total_num_scheduled_tokens)
        return plan

    scheduler.schedule = counting  # type: ignore[method-assign]
    cost = bench_scheduler.time_steps(scheduler, warmup=2, steps=30, is_async=is_async)
    assert cost.steps == 30
    assert planned[1:] == [5] * 31
    assert {r.num_output_tokens for r in scheduler.running} == {31 + (not is_async)}


def test_unknown_bench(capsys: Capture) -> None:
    """One line, with what there is."""
    assert main.main(["bench", "speed"]) == 2
    names = "latency, throughput, startup, serve, scheduler"
    assert f"there is no bench 'speed': one of {names}" in capsys.readouterr().err
    assert main.main(["bench"]) == 2
