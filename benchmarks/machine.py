"""What a result was measured on."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import platform
import re
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.process import ROOT

SETTLE_SECONDS, SETTLE_TRIES = 1.0, 10
"""How long ``Settler`` works before it looks, and how often at most."""
HANDED_BACK_SECONDS = 7.5
"""How long memory of a program that has ended goes back to the host (free page reporting).

In passes some 2.2 s apart: 1,024, 256 and 96 MiB of 1.4 GB, the last after 7 s. Who works meanwhile
lost .15 s of both CPUs at the first, .06 and .03 s at the others; who sleeps loses nothing.
"""
STOLEN_SHARE = 0.01
"""Of the CPUs' time: less is no reason to wait longer."""


def describe(threads: int) -> dict[str, Any]:
    """The machine, the system, and this commit; ready for JSON. Memory in bytes."""
    from twostep import _native as native
    from twostep.entrypoints.machine import inspect_machine

    machine = inspect_machine()
    info = native.cpu_info(os.environ.get("TWOSTEP_CPU_ISA", ""))
    return {
        "cpu": machine.cpu_model,
        "features": info["features"],
        "kernels": info["isa"],
        "logical_cpus": machine.logical_cpus,
        "usable_cpus": machine.usable_cpus,
        "threads": threads,
        "total_memory": machine.total_memory,
        "memory_bandwidth_gb_s": round(native.measure_bandwidth(threads, 256), 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


class Settler:
    """Lets a turn begin on a whole machine: none pays for the one before it."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._ended = seconds_of_ended_programs()

    def settle(self) -> None:
        """Wait for memory to go back if a program has ended, then until CPUs get all their time.

        A host may make a virtual machine wait for what it used before. Here whoever came after two
        runs of a program that takes and frees its weights lost 40 of every 100 ms, for half a
        second, even after 4 s of rest; and whoever comes after one, see HANDED_BACK_SECONDS.
        """
        ended = seconds_of_ended_programs()
        if ended != self._ended:
            self._ended = ended
            time.sleep(HANDED_BACK_SECONDS)
        for _ in range(SETTLE_TRIES):
            before = stolen_seconds()
            with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(work, [SETTLE_SECONDS] * self._threads))
            if stolen_seconds() - before <= STOLEN_SHARE * self._threads * SETTLE_SECONDS:
                return


def seconds_of_ended_programs() -> float:
    """CPU time of this process's children that have ended: another one's end makes it more."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def work(seconds: float) -> None:
    """Keep one CPU busy, without the interpreter's lock."""
    data = bytes(1 << 20)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        hashlib.sha256(data)


def stolen_seconds() -> float:
    """CPU time that this machine's host gave to others when it was asked for; 0 without a host."""
    cpu = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(cpu[8]) / os.sysconf("SC_CLK_TCK")


def commit() -> str:
    """This repository's, with ``+`` if files differ from it; "unknown" outside a repository."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "src", "csrc"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def slug(machine: dict[str, Any]) -> str:
    """For a folder's name: ``amd-epyc-9b14-2t``."""
    words = re.sub(r"\(.*?\)|processor|cpu|@.*", " ", machine["cpu"].lower())
    return "-".join([*re.findall(r"[a-z0-9]+", words), f"{machine['threads']}t"])
