"""Whether the weights fit, asked before the first of them is touched."""

from __future__ import annotations

from pathlib import Path

from twostep.contracts.errors import OutOfMemoryError

_MEMINFO = Path("/proc/meminfo")
_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
_CGROUP_STATS = (
    Path("/sys/fs/cgroup/memory.stat"),
    Path("/sys/fs/cgroup/memory/memory.stat"),
)


def available_memory() -> int | None:
    """Bytes that can still be used: the lesser of what machine and cgroup leave.

    File pages count as free, for the kernel drops them first. None where the system does not say.
    """
    known = [value for value in (_machine_available(), _cgroup_available()) if value is not None]
    return min(known, default=None)


def require_memory(path: Path, needed: int, available: int | None) -> None:
    """Refuse weights of ``needed`` bytes when only ``available`` are left.

    Raises:
        OutOfMemoryError: They do not fit; the message has both numbers and the cure.
    """
    if available is None or needed <= available:
        return
    raise OutOfMemoryError(
        f"{path}: the weights take {needed / 1e9:.1f} GB but only {available / 1e9:.1f} GB of "
        "memory are free; use a smaller model or a smaller --quantization, or free memory"
    )


def _machine_available() -> int | None:
    for line in _read_lines(_MEMINFO):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    for (limit_file, usage_file), stat_file in zip(_CGROUP_FILES, _CGROUP_STATS, strict=True):
        limit, usage = _read_number(limit_file), _read_number(usage_file)
        if limit is not None and usage is not None:
            return max(0, limit - usage + _inactive_file_bytes(stat_file))
    return None


def _inactive_file_bytes(stat_file: Path) -> int:
    names = ("inactive_file", "total_inactive_file")
    pairs = (line.split() for line in _read_lines(stat_file))
    return max((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names), default=0)


def _read_number(path: Path) -> int | None:
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
