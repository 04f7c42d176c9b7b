"""``twostep collect-env``: versions and settings for bug reports. Secrets are masked."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import twostep
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console
from twostep.entrypoints.cli.doctor import import_native
from twostep.entrypoints.machine import cpu_flags, inspect_machine

DESCRIPTION = "Print versions and settings for a bug report. Secrets are masked."

PACKAGES = (
    "numpy",
    "msgspec",
    "tokenizers",
    "jinja2",
    "huggingface-hub",
    "tqdm",
    "pip",
    "torch",
    "transformers",
)
PREFIXES = ("TWOSTEP_", "HF_", "OMP_", "CUDA_VISIBLE", "LD_PRELOAD", "PYTHON")
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def run(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = cli_args.Parser("twostep collect-env", "", DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse(argv)
    found = collect()
    if args.json:
        console.print_json(found)
        return 0
    for section, facts in found.items():
        print(f"{section}:")
        lines = [[name, str(value)] for name, value in facts.items()] or [["none", ""]]
        print(console.table(lines, indent="  "))
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Facts by section."""
    machine = inspect_machine()
    native = import_native()
    return {
        "twostep": {
            "version": twostep.__version__,
            "native": native if isinstance(native, str) else native.cpu_info()["isa"],
        },
        "system": {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "libc": " ".join(platform.libc_ver()),
        },
        "cpu": {
            "model": machine.cpu_model,
            "logical": machine.logical_cpus,
            "affinity": machine.affinity_cpus,
            "cgroup_quota": machine.cgroup_cpus,
            "flags": " ".join(cpu_flags()),
        },
        "memory": {
            "total": machine.total_memory,
            "available": machine.available_memory,
            "cgroup_limit": machine.cgroup_memory,
        },
        "packages": {name: version_of(name) for name in PACKAGES},
        "environment": {
            name: masked(name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES)
        },
    }


def version_of(package: str) -> str:
    """An installed package's version, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def masked(name: str, value: str) -> str:
    """A variable's value, unless its name says that it is a secret."""
    return "(set, not shown)" if any(word in name for word in SECRET_WORDS) else value
