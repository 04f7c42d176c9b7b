"""What a cell is made of, and the figures and ratios that come of it."""

from __future__ import annotations

import random
import statistics

import pytest
from benchmarks import cells, checks, stats
from benchmarks.cells import Cell, Request
from benchmarks.figures import MAIN_METRIC, Answer, decode_speed, figures, percentile
from benchmarks.models import all_models
from benchmarks.peers import step_loop
from benchmarks.results import CellResult, EngineResult, Record

PREFILL = Cell(name="prefill 128", kind="prefill", tokens=128)
DECODE = Cell(name="decode B=2 ctx 256", kind="decode", batch=2, context=256, new_tokens=4)


def request(prompt: int, new: int, arrival: float = 0.0) -> Request:
    return Request(arrival=arrival, prompt=[7] * prompt, max_tokens=new)


def answer(*times: float) -> Answer:
    return Answer(times=list(times), token_ids=[])


# -- figures --------------------------------------------------------------------------------------


def test_prefill_speed() -> None:
    found = figures(PREFILL, [request(128, 1)], [answer(0.5)])
    assert found == {"tokens_per_second": 256.0}


def test_decode_speed_counts_only_while_all_decode() -> None:
    """From the last first token (2.0) to the first last one (5.0): 3 + 2 tokens."""
    early, late = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.5, 6.0]
    assert decode_speed([early, late]) == pytest.approx(5 / 3)


def test_decode_that_never_overlaps_has_no_speed() -> None:
    with pytest.raises(ValueError, match="never decoded all at once"):
        decode_speed([[1.0, 2.0], [2.0, 3.0]])


def test_a_missing_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 tokens came where 4 were asked"):
        figures(DECODE, [request(256, 4)] * 2, [answer(1, 2, 3, 4), answer(1, 2, 3)])


def test_load_figures() -> None:
    mixed = Cell(name="mixed", kind="mixed", batch=2, rate=1.0)
    requests = [request(10, 2), request(20, 3, arrival=1.0)]
    found = figures(mixed, requests, [answer(0.5, 1.0), answer(3.0, 3.5, 5.0)])
    assert found["total_tokens_per_second"] == (30 + 5) / 5
    assert found["output_tokens_per_second"] == 1.0
    assert found["requests_per_second"] == 0.4
    assert found["ttft_p50"] == pytest.approx((0.5 + 2.0) / 2)
    assert found["ttft_p99"] == pytest.approx(0.5 + 0.99 * 1.5)
    assert found["tpot_p50"] == pytest.approx((0.5 + 1.0) / 2)


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (100, 4.0), (99, 3.97)])
def test_percentile(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


# -- rounds ---------------------------------------------------------------------------------------


def test_ratio_is_taken_round_by_round_against_the_better_variant() -> None:
    ours = {0: 10.0, 1: 40.0, 2: 30.0}
    peer = {"fa=off": {0: 5.0, 1: 10.0, 2: 10.0}, "fa=on": {0: 6.0, 1: 8.0, 2: 9.0}}
    found = stats.ratio(ours, peer)
    assert found is not None
    assert found.variant == "fa=off"
    assert found.per_round == [2.0, 4.0, 3.0]
    assert found.median == 3.0


def test_ratio_of_seconds_is_turned_round() -> None:
    found = stats.ratio({0: 0.5}, {"a": {0: 3.0}, "b": {0: 1.0}}, lower_is_better=True)
    assert found == stats.Ratio("b", [2.0])


def test_ratio_leaves_out_rounds_that_one_side_lacks() -> None:
    found = stats.ratio({0: 8.0, 2: 9.0}, {"a": {1: 1.0, 2: 3.0}})
    assert found == stats.Ratio("a", [3.0])
    assert stats.ratio({0: 8.0}, {"a": {}}) is None
    assert stats.ratio({}, {"a": {0: 1.0}}) is None


def test_summary() -> None:
    assert stats.Summary.of([3.0, 1.0, 2.0, 9.0]) == stats.Summary(2.5, 1.0, 9.0, 4)


# -- the record -----------------------------------------------------------------------------------


def cell_result() -> CellResult:
    result = CellResult(model="m", cell=PREFILL)
    speeds = {"twostep": (2.0, 4.0), "llama.cpp fa=on": (1.0, 1.0), "llama.cpp fa=off": (0.5, 3.0)}
    for name, values in speeds.items():
        rounds = {number: {"tokens_per_second": value} for number, value in enumerate(values)}
        result.engines[name] = EngineResult(name.split()[0], rounds)
    return result


def test_document_has_the_ratio_and_every_round() -> None:
    document = cell_result().document()
    one = document["ratios"]["tokens_per_second"]["llama.cpp"]
    assert one == {
        "variant": "llama.cpp fa=off",
        "median": pytest.approx((4.0 + 4 / 3) / 2),
        "per_round": [4.0, pytest.approx(4 / 3)],
    }
    assert document["engines"]["twostep"]["summary"]["tokens_per_second"]["median"] == 3.0
    assert len(document["engines"]["twostep"]["rounds"]) == 2


def test_wrong_output_has_no_speed() -> None:
    """An engine whose answers are wrong keeps its rounds but has no figures and no ratio."""
    result = cell_result()
    result.engines["twostep"].problems.append("wrong output: …")
    document = result.document()
    assert document["ratios"]["tokens_per_second"] == {}
    assert document["engines"]["twostep"]["summary"] == {}


def test_table_names_the_peers_better_setting_only() -> None:
    machine = {"cpu": "A CPU", "threads": 2, "kernels": "avx2", "date": "today", "commit": "abc"}
    record = Record(machine, {"twostep": "0"}, [], 2, cells=[cell_result()])
    lines = [line for line in record.table() if "tokens_per_second" in line]
    assert len(lines) == 3
    assert [line.endswith(" x |") for line in lines] == [False, False, True]
    assert "2.67 x" in lines[2]
    assert "3 (2 - 4)" in lines[0]


# -- checks ---------------------------------------------------------------------------------------


def test_greedy_tokens_must_be_likely_in_the_exact_run() -> None:
    expected = [[1, 2, 3, 4, 5]] * 4
    found = checks.judge([[1, 9], [2], [5], [1]], expected)
    assert (found["problem"], found["first"], found["among"]) == (None, 2, 4)
    one_off = checks.judge([[1], [2], [5], [6]], expected)
    assert one_off["problem"] is None
    two_off = checks.judge([[1], [2], [6], []], expected)
    assert two_off["problem"].startswith("wrong output: 2 of 4")


class Repeats:
    """Says a fixed token as often as asked."""

    def __init__(self, token: int) -> None:
        self.token = token

    def run(self, requests: list[Request]) -> list[Answer]:
        return [Answer([1.0] * r.max_tokens, [self.token] * r.max_tokens) for r in requests]


def test_other_tokens_alone_are_a_problem() -> None:
    requests = cells.requests_of(DECODE, 0)
    answers = [Answer([1.0] * 4, [3] * 4) for _ in requests]
    assert checks.check_alone(Repeats(3), DECODE, requests, answers) is None  # type: ignore[arg-type]
    problem = checks.check_alone(Repeats(4), DECODE, requests, answers)  # type: ignore[arg-type]
    assert problem is not None
    assert problem.startswith("wrong output")


# -- cells ----------------------------------------------------------------------------------------


def smol(tmp_path):  # type: ignore[no-untyped-def]
    return all_models(tmp_path)["smol-Q4_1"]


def test_every_cell_of_the_list_is_there(tmp_path) -> None:  # type: ignore[no-untyped-def]
    names = [cell.name for cell in cells.all_cells(smol(tmp_path))]
    assert {"start", "mixed", "prefix", "prefill 8192", "decode B=64 ctx 2048"} <= set(names)
    assert len(names) == 1 + 4 + 14 + 6 + 2 + 2 + 3
    longest = next(c for c in cells.all_cells(smol(tmp_path)) if c.name == "prefill 8192")
    assert longest.longest <= 8192  # the model's last position, the new token's included
    kinds = {cell.kind for cell in cells.all_cells(smol(tmp_path), quick=True)}
    assert kinds == {"start", "prefill", "decode", "batch", "mixed", "prefix", "http"}


def test_cells_are_chosen_by_whole_words(tmp_path) -> None:  # type: ignore[no-untyped-def]
    every = cells.all_cells(smol(tmp_path))
    chosen = cells.choose_cells(every, ["decode B=1", "start"])
    assert [c.name for c in chosen] == [
        "start",
        "decode B=1 ctx 256",
        "decode B=1 ctx 2048",
        "decode B=1 ctx 128",
    ]
    with pytest.raises(ValueError, match="no cell is named 'decode B=3'"):
        cells.choose_cells(every, ["decode B=3"])


def test_requests_are_the_same_for_every_engine_and_new_in_each_round(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for cell in cells.all_cells(smol(tmp_path)):
        if cell.kind == "start":
            continue
        first = cells.requests_of(cell, 0)
        assert first == cells.requests_of(cell, 0)
        assert (first == cells.requests_of(cell, 1)) == (cell.kind == "decode")
        assert max(len(r.prompt) + r.max_tokens for r in first) <= cell.longest


def test_a_batch_counts_from_its_start_to_its_last_token(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Prompts take their time of it, unlike ``decode``."""
    [cell] = cells.choose_cells(cells.all_cells(smol(tmp_path)), ["batch 16"])
    requests = cells.requests_of(cell, 0)
    assert [(len(r.prompt), r.max_tokens, r.arrival) for r in requests] == [(128, 128, 0)] * 16
    assert len({tuple(r.prompt) for r in requests}) == 16
    times = [2.0 + 0.015625 * number for number in range(1, 129)]  # till 4.0
    answers = [Answer(times=times, token_ids=[]) for _ in requests]
    metrics = figures(cell, requests, answers)
    assert metrics[MAIN_METRIC["batch"]] == pytest.approx(16 * 128 / 4.0)


def test_prefix_is_shared() -> None:
    cell = Cell(name="prefix", kind="prefix", batch=3, context=50, new_tokens=2)
    prompts = [tuple(r.prompt) for r in cells.requests_of(cell, 0)]
    assert len({prompt[:50] for prompt in prompts}) == 1
    assert len(set(prompts)) == 3


def test_mixed_lengths_have_the_means_they_claim() -> None:
    """Of the distribution before it is cut at 1024, which takes some of the tail away."""
    source = random.Random(0)
    pairs = [cells.mixed_lengths(source) for _ in range(20_000)]
    assert 0.85 < statistics.fmean(p for p, _ in pairs) / cells.PROMPT_MEAN < 1.0
    assert 0.85 < statistics.fmean(o for _, o in pairs) / cells.OUTPUT_MEAN < 1.0
    assert min(map(min, pairs)) >= cells.SHORTEST
    assert max(map(max, pairs)) == cells.LONGEST
    assert max(max(cells.mixed_lengths(source, 64)) for _ in range(99)) == 64
    load = cells.mixed_load(random.Random(1), 2000, rate=5.0)
    assert load[0].arrival == 0
    assert load[-1].arrival / 1999 == pytest.approx(0.2, rel=0.1)


# -- the loop -------------------------------------------------------------------------------------


class Stepped:
    """One token for every request in each step, which takes a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.added: list[tuple[float, int]] = []
        self.left: dict[str, int] = {}

    def add(self, request: Request, *, greedy: bool) -> str:
        assert not greedy
        self.added.append((self.now, request.max_tokens))
        self.left[str(len(self.added))] = request.max_tokens
        return str(len(self.added))

    def step(self) -> list[tuple[str, list[int]]]:
        self.now += 1
        news = [(name, [int(name)]) for name in self.left]
        self.left = {name: n - 1 for name, n in self.left.items() if n > 1}
        return news

    def busy(self) -> bool:
        return bool(self.left)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_step_loop_keeps_to_the_arrivals() -> None:
    engine = Stepped()
    requests = [request(5, 2), request(5, 1, arrival=0.5), request(5, 1, arrival=10.0)]
    found = step_loop.run(
        engine, requests, cached=False, greedy=False, clock=lambda: engine.now, sleep=engine.sleep
    )
    assert [each["times"] for each in found] == [[1.0, 2.0], [2.0], [11.0]]
    assert [each["token_ids"] for each in found] == [[1, 1], [2], [3]]


def test_step_loop_computes_cached_prompts_before_the_clock() -> None:
    engine = Stepped()
    found = step_loop.run(
        engine, [request(5, 3)], cached=True, greedy=False, clock=lambda: engine.now
    )
    assert engine.added == [(0.0, 1), (1.0, 3)]
    assert found[0]["times"] == [1.0, 2.0, 3.0]
