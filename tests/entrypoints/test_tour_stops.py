"""The stops, the text and the page: whose functions they name, and that nothing is typed in."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import main as cli
from twostep.entrypoints.cli import tour as tour_command
from twostep.entrypoints.tour.document import tour_document
from twostep.entrypoints.tour.journey import Journey, Situation
from twostep.entrypoints.tour.layout import block, show
from twostep.entrypoints.tour.page import COMMAND, tour_page
from twostep.entrypoints.tour.simulated import simulate
from twostep.entrypoints.tour.source import place
from twostep.entrypoints.tour.stops import Stop, all_stops
from twostep.entrypoints.tour.text import tour_text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tour.md"

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def journey() -> Journey:
    """The seed's example."""
    return simulate()


@pytest.fixture(scope="module")
def stops(journey: Journey) -> list[Stop]:
    """Its stops."""
    return all_stops(journey)


def plainly(text: str) -> str:
    """No colours."""
    return text


def test_twelve_stops_in_the_files_of_the_design(stops: list[Stop]) -> None:
    assert [stop.number for stop in stops] == list(range(1, 13))
    assert [stop.place.short for stop in stops] == [
        "engine/client.py: InprocClient.get_output",
        "scheduler/scheduler.py: Scheduler.schedule",
        "scheduler/async_scheduler.py: AsyncScheduler._update_after_schedule",
        "sim/executor.py: SimExecutor.execute_model",
        "runner/graphs.py: GraphDispatcher.dispatch",
        "runner/input_batch.py: build_input_batch",
        "sim/executor.py: SimExecutor.execute_model",
        "scheduler/scheduler.py: Scheduler.get_grammar_bitmask",
        "sim/executor.py: SimExecutor.sample_tokens",
        "engine/core.py: EngineCore.step_with_batch_queue",
        "scheduler/scheduler.py: Scheduler.update_from_output",
        "engine/client.py: InprocClient.get_output",
    ]


def test_every_named_function_is_where_the_tour_says(stops: list[Stop]) -> None:
    for stop in stops:
        for found in (stop.place, *stop.also):
            name = found.function.rpartition(".")[2]
            line = (ROOT / found.file).read_text(encoding="utf-8").splitlines()[found.line - 1]
            # A decorated function begins with its decorator.
            assert f"def {name}(" in line or line.lstrip().startswith("@"), found


def test_place_is_asked_of_the_function_itself() -> None:
    module = importlib.import_module(place(place).file[len("src/") : -len(".py")].replace("/", "."))
    assert getattr(module, place(place).function) is place
    assert place(Journey.name).function == "Journey.name"


def test_document_has_all_of_every_stop(journey: Journey) -> None:
    for stop in tour_document(journey)["stops"]:
        assert {"number", "name", "file", "function", "line", "data"} <= set(stop)
        assert stop["data"]


def test_other_sizes_give_other_numbers() -> None:
    """Nothing is typed in: a budget of 1000 and a prompt of 2,900 show up everywhere."""
    journey = simulate(
        Situation(prompt_tokens_b=100, known_outputs_b=7, prompt_tokens_a=2900),
        max_num_batched_tokens=1000,
    )
    document = tour_document(journey)
    assert document["config"]["max_num_batched_tokens"] == 1000
    assert document["counters"][0]["B"]["num_tokens"] == 107
    assert document["scheduler_output"]["num_scheduled_tokens"] == {"B": 1, "A": 999}
    assert document["batch"]["query_start_loc"] == [0, 1, 1000]
    assert document["batch"]["positions"] == [107, *range(999, 1998)]
    assert document["outputs"]["0"][0]["new_token_ids"] == [8]
    assert document["budget_left_k_plus_1"] == 1000 - 1 - (2900 - 1998)
    text = " ".join(tour_text(journey, 80, plainly, plainly).split())
    assert "B needs 107 + 1 - 107 = 1 and gets 1." in text
    assert "A needs 2,900 + 0 - 999 = 1,901 and gets 999: no more is left." in text
    assert "Why does A get 999 tokens and not 1,901?" in text
    for typed_in in ("8,191", "8191", "11,809", "540", "16382", "16,382", "20,000", "20000", "41]"):
        assert typed_in not in text


def test_a_small_budget_fits_a_graph() -> None:
    journey = simulate(Situation(prompt_tokens_a=1000), max_num_batched_tokens=256)
    document = tour_document(journey)
    assert document["graph_mode"] == {"step_k": "PIECEWISE", "two_decodes": "FULL"}
    assert "padded to 256, mode PIECEWISE" in document["questions"][4]["answer"]


def test_a_step_of_another_device_takes_another_time(journey: Journey) -> None:
    other = tour_document(simulate(device="a100-80"))
    assert other["config"]["max_num_batched_tokens"] == 2048
    assert other["config"]["max_num_seqs"] == 256
    assert other["time"]["device_ms"] != tour_document(journey)["time"]["device_ms"]


def test_a_prompt_that_is_no_chunk_is_refused() -> None:
    with pytest.raises(UsageError, match="longer than two steps of 8192 tokens"):
        simulate(Situation(prompt_tokens_a=9000))


@pytest.mark.parametrize("width", [80, 100])
def test_text_fits_the_terminal(journey: Journey, width: int) -> None:
    lines = tour_text(journey, width, plainly, plainly).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


def test_text_has_stops_table_times_and_questions(capsys: Capture) -> None:
    assert cli.main(["tour"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    for number in range(1, 13):
        assert f"\n{number:>2}  " in out
    for text in ("before S k", "U k+1", "Where the time goes", "Check yourself", "[541, 16382]"):
        assert text in out


def test_page_is_what_the_command_writes(journey: Journey) -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == tour_page(journey), f"docs/tour.md is stale: {COMMAND} > docs/tour.md"


def test_page_has_no_line_numbers_and_no_broken_links(journey: Journey) -> None:
    page = tour_page(journey)
    assert ".py:1" not in page
    for link in page.split("](../")[1:]:
        assert (ROOT / link.partition(")")[0]).is_file()


def test_unknown_device_is_a_usage_error(capsys: Capture) -> None:
    assert cli.main(["tour", "--device", "h1000"]) == 2
    assert "h100" in capsys.readouterr().err


def test_width_follows_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert tour_command.run([]) == 0
    widest = max(map(len, capsys.readouterr().out.splitlines()))
    assert 80 < widest <= tour_command.WIDEST


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2, 3], "[1, 2, 3]"),
        ([540, 8, 9, 10, 11], "[540, 8..11]"),
        ([True, False], "[True, False]"),
        (list(range(0, 100, 2)), "[0, 2, 4, ..., 98] (50)"),
        ({"B": 1, "A": None}, "{B: 1, A: None}"),
        (1.23456789, "1.235"),
        ([], "[]"),
    ],
)
def test_show(value: Any, text: str) -> None:
    assert show(value) == text


def test_block() -> None:
    assert block({"a": 1, "rows": [{"x_y": 1, "z": None}]}, 80) == [
        "a  1",
        "rows",
        "  x y  z",
        "  1    -",
    ]
    assert block({"long": {"name": "text " * 5}}, 20) == [
        "long",
        "  name",
        "    text text text",
        "    text text",
    ]
