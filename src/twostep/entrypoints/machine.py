"""What this process may use of the machine: cores and memory, after affinity and cgroup limits."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import msgspec

ROOT = Path("/")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of this process. Memory in bytes; None where the system does not say."""

    cpu_model: str
    logical_cpus: int
    """Of the whole machine."""
    affinity_cpus: int
    """That this process may run on."""
    cgroup_cpus: float | None
    """CPU quota of the tightest cgroup; None if there is none."""
    total_memory: int | None
    available_memory: int | None
    """Free for new allocations, the cgroup's limit included."""
    cgroup_memory: int | None

    @property
    def usable_cpus(self) -> int:
        """Threads that can run at once."""
        if self.cgroup_cpus is None:
            return self.affinity_cpus
        return max(1, min(self.affinity_cpus, int(self.cgroup_cpus + 0.5)))


def inspect_machine(root: Path = ROOT) -> Machine:
    """Look at the machine. ``root`` stands for ``/`` in tests."""
    groups = cgroup_folders(root)
    meminfo = read_meminfo(root)
    limits = [limit - used for limit, used in memory_limits(groups)]
    available = meminfo.get("MemAvailable")
    if limits:
        available = max(0, min([*limits, *([] if available is None else [available])]))
    return Machine(
        cpu_model=cpu_model(root),
        logical_cpus=os.cpu_count() or 1,
        affinity_cpus=affinity_cpus(),
        cgroup_cpus=cgroup_cpus(groups),
        total_memory=meminfo.get("MemTotal"),
        available_memory=available,
        cgroup_memory=min((limit for limit, _ in memory_limits(groups)), default=None),
    )


def affinity_cpus() -> int:
    """Cores that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model(root: Path = ROOT) -> str:
    """The processor's name."""
    for line in _lines(root / "proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_flags(root: Path = ROOT) -> list[str]:
    """Instruction sets that the kernel lists."""
    for line in _lines(root / "proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            return line.partition(":")[2].split()
    return []


def read_meminfo(root: Path = ROOT) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found: dict[str, int] = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def cgroup_folders(root: Path = ROOT) -> list[Path]:
    """Folders of this process's cgroups (version 2 and 1) and all above them, innermost first."""
    mount = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and not {"cpu", "memory"} & set(controllers.split(",")):
            continue
        top = mount / controllers if controllers else mount
        inner = top / path.strip().lstrip("/")
        while inner != top and top in inner.parents:
            folders.append(inner)
            inner = inner.parent
        # Inside a container the path may belong to the host; the mount itself is then ours.
        folders.append(top)
    return folders


def cgroup_cpus(folders: list[Path]) -> float | None:
    """The tightest CPU quota, in cores."""
    quotas = []
    for folder in folders:
        words = " ".join(
            _lines(folder / "cpu.max")
        ).split()  # version 2: "200000 100000" or "max …"
        if len(words) != 2:
            quota = " ".join(_lines(folder / "cpu.cfs_quota_us")).strip()
            words = [quota, " ".join(_lines(folder / "cpu.cfs_period_us")).strip()]
        with contextlib.suppress(ValueError, ZeroDivisionError):
            cores = int(words[0]) / int(words[1])
            if cores > 0:
                quotas.append(cores)
    return min(quotas, default=None)


def memory_limits(folders: list[Path]) -> list[tuple[int, int]]:
    """(limit, used) in bytes for each cgroup that has a limit."""
    names = (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    found = []
    for folder in folders:
        for limit_name, used_name in names:
            with contextlib.suppress(ValueError):
                limit = int(" ".join(_lines(folder / limit_name)))
                used = int(" ".join(_lines(folder / used_name)))
                if limit < 1 << 60:  # version 1 writes a huge number for "no limit"
                    found.append((limit, used - reclaimable(folder)))
    return found


def reclaimable(folder: Path) -> int:
    """Bytes of file cache that a cgroup gives back under pressure."""
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.strip().isdigit():
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
