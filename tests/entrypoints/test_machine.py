"""Cores and memory after affinity and cgroup limits, read from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostep.entrypoints.machine import Machine, cpu_flags, inspect_machine, read_meminfo

MEMINFO = "MemTotal:       16000 kB\nMemAvailable:    8000 kB\nHugePages_Total:   3\n"
CPUINFO = "processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: sse2 avx2 fma\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", MEMINFO)
    write(tmp_path / "proc/cpuinfo", CPUINFO)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_no_limits(root: Path) -> None:
    machine = inspect_machine(root)
    assert machine.cpu_model == "Test CPU"
    assert machine.total_memory == 16000 * 1024
    assert machine.available_memory == 8000 * 1024
    assert machine.cgroup_cpus is None
    assert machine.cgroup_memory is None
    assert machine.usable_cpus == machine.affinity_cpus
    assert cpu_flags(root) == ["sse2", "avx2", "fma"]


def test_meminfo_units(root: Path) -> None:
    assert read_meminfo(root)["HugePages_Total"] == 3


def test_cgroup_v2_the_tightest_level_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/outer/inner\n")
    write(root / "sys/fs/cgroup/outer/cpu.max", "150000 100000\n")
    write(root / "sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n")
    write(root / "sys/fs/cgroup/outer/inner/memory.max", "4096000\n")
    write(root / "sys/fs/cgroup/outer/inner/memory.current", "1096000\n")
    write(root / "sys/fs/cgroup/outer/inner/memory.stat", "anon 1\ninactive_file 96000\n")
    write(root / "sys/fs/cgroup/outer/memory.max", "max\n")
    machine = inspect_machine(root)
    assert machine.cgroup_cpus == 1.5
    assert machine.cgroup_memory == 4096000
    assert machine.available_memory == 4096000 - 1000000


def test_cgroup_v2_in_a_container(root: Path) -> None:
    """The path may name the host's tree; the limits are then at the mount itself."""
    write(root / "proc/self/cgroup", "0::/docker/abc\n")
    write(root / "sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert inspect_machine(root).cgroup_cpus == 2.0


def test_cgroup_v1(root: Path) -> None:
    write(root / "proc/self/cgroup", "3:cpu,cpuacct:/job\n5:memory:/job\n9:devices:/job\n")
    write(root / "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "50000\n")
    write(root / "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    write(root / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2000000\n")
    write(root / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "500000\n")
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root / "sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n")
    machine = inspect_machine(root)
    assert machine.cgroup_cpus == 0.5
    assert machine.cgroup_memory == 2000000
    assert machine.available_memory == 1500000


def test_no_quota_in_v1(root: Path) -> None:
    write(root / "proc/self/cgroup", "3:cpu:/\n")
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert inspect_machine(root).cgroup_cpus is None


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    machine = inspect_machine(tmp_path)
    assert machine.total_memory is None
    assert machine.available_memory is None
    assert machine.usable_cpus >= 1


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [(8, None, 8), (8, 2.0, 2), (8, 1.5, 2), (8, 0.2, 1), (2, 16.0, 2), (8, 2.4, 2)],
)
def test_usable_cpus(affinity: int, quota: float | None, usable: int) -> None:
    machine = Machine(
        cpu_model="x",
        logical_cpus=8,
        affinity_cpus=affinity,
        cgroup_cpus=quota,
        total_memory=None,
        available_memory=None,
        cgroup_memory=None,
    )
    assert machine.usable_cpus == usable
