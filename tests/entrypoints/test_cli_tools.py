"""``pull``, ``models``, ``doctor``, ``collect-env`` and what they share."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from twostep.entrypoints import environment, store
from twostep.entrypoints.catalogue import CATALOGUE
from twostep.entrypoints.cli import collect_env, console, doctor, models, pull
from twostep.entrypoints.cli import engine as cli_engine
from twostep.entrypoints.machine import Machine

Capture = pytest.CaptureFixture[str]


class FakeNative:
    """The native library's functions that doctor calls."""

    def __init__(self) -> None:
        self.measured: list[tuple[int, int]] = []

    def cpu_info(self, isa: str = "") -> dict[str, Any]:
        if isa == "avx512":
            raise ValueError("TWOSTEP_CPU_ISA=avx512 cannot run here; use one of avx2, scalar")
        return {
            "isa": isa or "avx2",
            "reason": "forced" if isa else "the best",
            "isas": ["avx2", "scalar"],
            "features": ["avx2", "fma"],
        }

    def measure_bandwidth(self, num_threads: int, megabytes: int) -> float:
        self.measured.append((num_threads, megabytes))
        return 7.152 * num_threads

    def measure_peak(self, isa: str, kind: str, num_threads: int) -> float:
        assert isa in ("avx2", "scalar")
        return {"int8": 400.0, "bf16": 90.0, "fp32": 100.0}[kind] * num_threads


def machine(**changes: Any) -> Machine:
    facts: dict[str, Any] = {
        "cpu_model": "Test CPU",
        "logical_cpus": 8,
        "affinity_cpus": 8,
        "cgroup_cpus": None,
        "total_memory": 16 * 10**9,
        "available_memory": 8 * 10**9,
        "cgroup_memory": None,
    }
    return Machine(**(facts | changes))


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_json(capsys: Capture) -> None:
    native = FakeNative()
    doctor.run(["--json", "--threads", "3"], native)
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"] == native.cpu_info()
    assert found["memory_bandwidth_gb_s"] == 21.46
    assert found["roofline"]["bandwidth_gb_s"] == {"1": 7.15, "2": 14.3, "3": 21.46}
    assert found["roofline"]["gop_s"]["int8"] == {"1": 400.0, "2": 800.0, "3": 1200.0}
    assert native.measured == [(n, doctor.BANDWIDTH_MEGABYTES) for n in (1, 2, 3)]


def test_doctor_for_people(capsys: Capture) -> None:
    doctor.run(["--threads", "2"], FakeNative())
    out = capsys.readouterr().out
    assert "avx2 (the best; can run avx2, scalar)" in out
    assert "7.2 GB/s (1 thread), 14.3 GB/s (2 threads), measured" in out
    assert "400.0 GOP/s (1 thread), 800.0 GOP/s (2 threads), measured" in out


def test_doctor_with_forced_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_CPU_ISA", "scalar")
    assert doctor.examine(machine(), FakeNative())["kernels"]["isa"] == "scalar"
    monkeypatch.setenv("TWOSTEP_CPU_ISA", "avx512")
    found = doctor.examine(machine(), FakeNative())
    assert found["kernels"]["isa"] == "avx2"
    assert any("cannot run here" in problem for problem in found["problems"])


def test_doctor_without_the_native_library(capsys: Capture) -> None:
    assert doctor.run([], "No module named 'twostep._native'") == 1
    out, err = capsys.readouterr()
    assert "not measured" in out
    assert "pip install ." in err


def test_doctor_json_without_the_native_library(capsys: Capture) -> None:
    assert doctor.run(["--json"], "broken") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"] is None
    assert len(found["problems"]) >= 1


@pytest.mark.parametrize(
    ("changes", "threads", "count", "reason"),
    [
        ({}, None, 8, "all cores"),
        ({"affinity_cpus": 4}, None, 4, "CPU affinity: 4 of 8 cores"),
        ({"cgroup_cpus": 2.0}, None, 2, "cgroup quota of 2 cores"),
        ({}, 5, 5, "asked for"),
    ],
)
def test_doctor_threads(
    changes: dict[str, Any], threads: int | None, count: int, reason: str
) -> None:
    found = doctor.examine(machine(**changes), FakeNative(), threads)
    assert (found["threads"], found["threads_reason"]) == (count, reason)


def test_doctor_sees_low_memory() -> None:
    problems = doctor.machine_problems(machine(available_memory=10**8))
    assert any("100.0 MB of memory" in problem for problem in problems)


def test_doctor_sees_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_space", lambda folder: 10**8)
    problems = doctor.machine_problems(machine())
    assert any("TWOSTEP_HOME" in problem for problem in problems)


# -- models and pull ------------------------------------------------------------------------------


def present_model() -> Path:
    path = store.path_of(CATALOGUE[0])
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(CATALOGUE[0].size_bytes)
    return path


def test_models(capsys: Capture) -> None:
    path = present_model()
    assert models.run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(CATALOGUE)
    assert str(path) in lines[1]
    assert "Apache-2.0" in lines[1]
    assert str(path) not in lines[2]


def test_models_json(capsys: Capture) -> None:
    path = present_model()
    models.run(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert [m["downloaded"] for m in found] == [True] + [False] * (len(CATALOGUE) - 1)
    assert [m["path"] for m in found[:2]] == [str(path), None]


def test_pull_prints_the_path(capsys: Capture) -> None:
    path = present_model()
    assert pull.run([CATALOGUE[0].name]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert pull.run([CATALOGUE[0].name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(path)


# -- collect-env ----------------------------------------------------------------------------------


def test_collect_env_masks_what_is_private(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    monkeypatch.setenv("TWOSTEP_API_KEY", "sesame_too")
    monkeypatch.setenv("TWOSTEP_CPU_ISA", "scalar")
    for argv in ([], ["--json"]):
        assert collect_env.run(argv) == 0
        out = capsys.readouterr().out
        assert "sesame" not in out
        assert "(set, not shown)" in out
        assert "scalar" in out


def test_collect_env_names_missing_packages() -> None:
    assert collect_env.version_of("no-such-package-at-all") == "not installed"


# -- environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "is_on"),
    [("1", True), ("true", True), ("0", False), ("", False), ("False", False), ("off", False)],
)
def test_switches(monkeypatch: pytest.MonkeyPatch, value: str, is_on: bool) -> None:
    monkeypatch.setenv("TWOSTEP_OFFLINE", value)
    assert environment.is_offline() is is_on


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_HOME", "~/models")
    assert environment.home() == Path.home() / "models"
    monkeypatch.delenv("TWOSTEP_HOME")
    assert environment.home() == Path.home() / ".cache" / "twostep"


# -- console --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert console.dim("x", Terminal()) == "\x1b[2mx\x1b[0m"
    assert console.bold("x", Terminal()) == "\x1b[1mx\x1b[0m"
    assert console.dim("x", io.StringIO()) == console.bold("x", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.dim("x", Terminal()) == "x"


def test_table() -> None:
    assert console.table([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc  d"


def test_loading_shows_phases_on_a_slow_terminal_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter([0.0, 0.1, 1.0])
    monkeypatch.setattr(cli_engine.time, "monotonic", lambda: next(ticks))
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with cli_engine.phases() as progress:
        progress("quick", 0.1)
        assert terminal.getvalue() == ""
        progress("weights", 0.5)
        assert "weights  50%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[K")  # the line is gone again


def test_boot_table(factory: Any, gguf: Path, capsys: Capture) -> None:
    class Report:
        def rows(self) -> list[list[str]]:
            return [["threads", "2"]]

    class Engine(contextlib.nullcontext[None]):
        boot = Report()

    resolved = cli_engine.ResolvedModel(name="x", path=gguf, format="gguf")
    with cli_engine.load(lambda path, **o: Engine(), resolved, {}, verbose=True):
        assert "threads  2" in capsys.readouterr().err
