"""``twostep replay``, and the flags of the commands that make what it reads."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.tiny_models import tiny_gguf
from helpers.toy_engine import make_toy, run_load

from twostep import LLM, SamplingParams, StructuredOutputsParams
from twostep.contracts.errors import UsageError
from twostep.engine import recording as rec
from twostep.entrypoints.cli import chat, complete, replay
from twostep.entrypoints.cli.main import main
from twostep.entrypoints.tracing.trace_file import read_spans
from twostep.entrypoints.tracing.watch import Watch

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The command silences the engine's log for its process; a test is not one."""
    yield
    logging.getLogger("twostep.engine").setLevel(logging.NOTSET)


@pytest.fixture
def recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    caplog.set_level(logging.CRITICAL)
    path = tmp_path / "run.rec"
    toy = make_toy()
    watch = Watch(None, path)
    observer = watch.begin(toy.executor, toy.clock, toy.scheduler_config, toy.cache_config)
    run_load(toy, toy.core(observer), 4, faults=True)
    watch.close()
    return path


def alter(path: Path, step: int) -> None:
    """Another number of tokens in one recorded plan."""
    with path.open("rb") as file:
        old = rec.Recording(file, "")
        events = list(old.events())
    for index, event in enumerate(events):
        if isinstance(event, rec.Planned):
            plan = rec.decode_plan(event.plan)
            if plan.step_id == step:
                plan = msgspec.structs.replace(plan, total_num_scheduled_tokens=1000)
                events[index] = rec.Planned(event.time, msgspec.Raw(rec.encode_plan(plan)))
    path.write_bytes(rec.encode_header(old.header) + rec.encode_events(events))


def test_lines_and_summary_twice_the_same(recording: Path, capsys: Capture) -> None:
    assert replay.run([str(recording)]) == 0
    first = capsys.readouterr()
    assert replay.run([str(recording)]) == 0
    assert capsys.readouterr() == first
    lines = first.out.splitlines()
    assert lines[0].split() == ["step", "requests", "tokens", "blocks"]
    assert lines[1].split()[0] == "0"
    assert any("preempted" in line for line in lines)
    assert lines[-2].startswith("all as recorded: plans ")
    assert lines[-1].startswith("device idle ")
    assert all(len(line) <= 80 for line in lines)
    assert first.err == ""


def test_json(recording: Path, capsys: Capture) -> None:
    assert replay.run([str(recording), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is True
    assert found["difference"] is None
    assert found["was_killed"] is False
    assert found["plans"] > 60
    assert found["requests"] > 10
    assert 0 < found["device_idle_share"] < 1
    assert 0 < found["host_overlap"] <= 1


def test_trace_of_a_recording(recording: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run.json"
    assert replay.run([str(recording), "--json", "--trace", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text())
    assert sum(s.lane == "planning" for s in read_spans(out)) == found["plans"]


def test_until(recording: Path, capsys: Capture) -> None:
    assert replay.run([str(recording), "--until", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[1:9]] == list(range(8))
    assert lines[9].startswith("all as recorded: plans 8,")


def test_difference(recording: Path, capsys: Capture) -> None:
    alter(recording, 9)
    assert main(["replay", str(recording)]) == 1
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith(f"twostep: error: {recording} (recorded by twostep ")
    assert "step 9, total_num_scheduled_tokens: recorded 1000, now " in line
    assert "+ total" not in captured.out
    assert main(["replay", str(recording), "--verbose"]) == 1
    out = capsys.readouterr().out
    assert "- total_num_scheduled_tokens: 1000\n+ total_num_scheduled_tokens: " in out
    assert "  step_id: 9" in out
    assert main(["replay", str(recording), "--until", "8"]) == 0


def test_difference_as_json(recording: Path, capsys: Capture) -> None:
    alter(recording, 9)
    assert main(["replay", str(recording), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False
    assert found["difference"]["step"] == 9
    assert found["difference"]["field"] == "total_num_scheduled_tokens"
    assert "recorded_plan" not in found["difference"]
    assert main(["replay", str(recording), "--json", "-v"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["recorded_plan"]["total_num_scheduled_tokens"] == 1000


def test_a_killed_program(recording: Path, capsys: Capture) -> None:
    data = recording.read_bytes()
    recording.write_bytes(data[: len(data) * 2 // 3])
    assert main(["replay", str(recording)]) == 0
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith(f"{recording} ends after step ")
    assert line.endswith(": the program was killed")
    assert "all as recorded" in captured.out
    with recording.open("rb") as file:
        header = rec.encode_header(rec.Recording(file, "").header)
    recording.write_bytes(header)
    assert main(["replay", str(recording)]) == 0
    assert "ends before its first step: the program was killed" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["flip", "foreign", "empty", "missing", "folder"])
def test_bad_files(recording: Path, damage: str, capsys: Capture) -> None:
    data = bytearray(recording.read_bytes())
    path, code = recording, 1
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "foreign":
        path.write_bytes(b"GGUF" + bytes(100))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path, code = recording.with_name("nothing"), 2
    else:
        path, code = recording.parent, 2
    assert main(["replay", str(path)]) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("twostep: error: ")
    assert str(path) in line


# -- the flags of other commands -------------------------------------------------------------------


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_an_unwritable_file_is_told_before_anything_else(
    command: str, factory: Any, tmp_path: Path
) -> None:
    """Before a model is looked for: it may have to be fetched."""
    run = {"chat": chat.run, "complete": complete.run}[command]
    for flag in ("--trace", "--record"):
        argv = ["no-such-model", "Hi", flag, str(tmp_path / "no" / "x")]
        with pytest.raises(UsageError, match=f"{flag} .* No such file"):
            run(argv, factory)
    assert factory.made == []


def test_the_engine_gets_the_paths_and_the_user_the_lines(
    factory: Any, gguf: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, record = str(tmp_path / "t.json"), str(tmp_path / "r.rec")

    def make(path: str, **options: Any) -> Any:
        engine = factory(path, **options)
        engine.watch = Watch(options["trace"], options["record"])
        monkeypatch.setattr(engine, "close", engine.watch.close)
        return engine

    argv = [str(gguf), "Once", "--json", "--trace", trace, "--record", record]
    assert complete.run(argv, make) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["prompt"] == "Once"
    assert captured.err.splitlines() == [
        f"trace: {trace} (open it in ui.perfetto.dev or chrome://tracing)",
        f"recording: {record} (twostep replay {record})",
    ]


def test_no_model_no_native_module(recording: Path) -> None:
    """A recording is replayed where nothing is compiled."""
    code = (
        "import sys; sys.modules['twostep._native'] = None\n"
        "from twostep.entrypoints.cli.main import main\n"
        f"code = main(['replay', {str(recording)!r}, '--json'])\n"
        "assert 'numpy' not in sys.modules, 'slow to start'\n"
        "sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=50)


def test_simulate_writes_both(tmp_path: Path, capsys: Capture) -> None:
    trace, record = tmp_path / "t.json", tmp_path / "r.rec"
    argv = ["simulate", "llama-3.1-8b", "--num-requests", "3", "--input-len", "100"]
    argv += ["--output-len", "5", "--json", "--trace", str(trace), "--record", str(record)]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert str(trace) in captured.err
    assert {s.lane for s in read_spans(trace)} >= {"planning", "device", "update"}
    graphs = {s.graph for s in read_spans(trace) if s.lane == "device"}
    assert graphs == {"PIECEWISE", "FULL"}, "short prompts and decodes on an H100"
    assert main(["replay", str(record), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 3


@pytest.mark.native
def test_a_run_with_grammars(tmp_path: Path, capsys: Capture) -> None:
    """A real engine with every kind of constraint, one that is in vain, and a free request."""
    record = tmp_path / "run.rec"
    constraints = [
        None,
        StructuredOutputsParams(json={"enum": [1, {"a": None}]}),
        StructuredOutputsParams(regex="[ab]{3}"),
        StructuredOutputsParams(choice=("red", "dark blue")),
        StructuredOutputsParams(grammar='start: "yes" | "no" " sir"?'),
    ]
    every = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=20, structured_outputs=each)
        for i, each in enumerate(constraints * 2)
    ]
    every[3].max_tokens = 2  # cut
    every[2].allowed_token_ids = [5]  # no token is left
    model = tiny_gguf(tmp_path, "llama", "Q4_0")
    with LLM(model, max_model_len=64, max_num_seqs=4, threads=1, record=record) as llm:
        outputs = llm.generate(["Once"] * len(every), every, use_tqdm=False)
    assert {o.outputs[0].finish_reason for o in outputs} == {"stop", "length", "error"}
    assert main(["replay", str(record), "--json"]) == 0
    assert logging.getLogger("twostep.engine").level == logging.NOTSET, "of whoever called us"
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert not found["was_killed"]
    assert found["requests"] == len(every)
    with record.open("rb") as file:
        said = [e.news for e in rec.Recording(file, "").events() if isinstance(e, rec.GrammarSaid)]
    assert said.count("ready") == 8
    assert said.count("ended") >= 5
