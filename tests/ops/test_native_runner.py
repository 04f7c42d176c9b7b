"""The kernels' own tests (tests/native, a program without Python): here, and on an emulated ARM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

native = pytest.importorskip("twostep._native")

pytestmark = pytest.mark.native

BUILD = Path(__file__).parents[2] / "build"
FAMILIES = ["linear", "attention", "rows", "sample"]


@pytest.fixture
def runner() -> list[str]:
    """Built beside the module that this interpreter loads."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = sorted(BUILD.glob(f"{tag}-*/native_tests"))
    if not found:
        pytest.skip(
            "tests/native is not built: CMAKE_ARGS=-DTWOSTEP_BUILD_NATIVE_TESTS=ON pip install -e ."
        )
    return [str(found[0])]


@pytest.fixture
def arm() -> list[str]:
    """The emulator's command line up to the program's name."""
    emulator, program = shutil.which("qemu-aarch64"), BUILD / "aarch64" / "native_tests"
    if not program.exists() or emulator is None:
        pytest.skip("tests/native is not built for ARM: scripts/build-arm-tests, and qemu-aarch64")
    return [emulator]


def run(command: list[str], isa: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TWOSTEP_CPU_ISA": isa}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("isa", native.cpu_info()["isas"])
def test_kernels_here(runner: list[str], isa: str, family: str) -> None:
    result = run([*runner, family], isa)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"{isa}: ")


def test_the_program_and_the_module_choose_alike(runner: list[str]) -> None:
    assert run([*runner, "--list"]).stdout.split() == native.cpu_info()["isas"]


def test_a_wrong_call_is_refused(runner: list[str]) -> None:
    assert run([*runner, "colour"]).returncode == 2
    result = run([*runner, "rows"], "mmx")
    assert result.returncode == 2
    assert "TWOSTEP_CPU_ISA=mmx cannot run here" in result.stderr


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("isa", ["neon", "scalar"])
def test_kernels_on_arm(arm: list[str], isa: str, family: str) -> None:
    result = run([*arm, str(BUILD / "aarch64" / "native_tests"), family], isa)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"{isa}: ")


def test_arm_without_dot_products_runs_plain_kernels(arm: list[str]) -> None:
    program = str(BUILD / "aarch64" / "native_tests")
    assert run([*arm, "-cpu", "neoverse-n1", program, "--list"]).stdout.split() == [
        "neon",
        "scalar",
    ]
    old = [*arm, "-cpu", "cortex-a72", program]
    assert run([*old, "--list"]).stdout.split() == ["scalar"]
    result = run([*old, "rows"], "neon")
    assert result.returncode == 2
    assert "TWOSTEP_CPU_ISA=neon cannot run here; use one of scalar" in result.stderr
