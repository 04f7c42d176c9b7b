"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from typing import Any

from benchmarks.process import ROOT


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
