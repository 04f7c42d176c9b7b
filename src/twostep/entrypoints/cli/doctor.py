"""``twostep doctor``: what this machine can do for the engine, and what stands in its way."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any, Protocol

import twostep
from twostep.entrypoints import roofline_plot, store
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console, doctor_model
from twostep.entrypoints.machine import Machine, inspect_machine
from twostep.entrypoints.progress import format_bytes, reporter_for
from twostep.entrypoints.resolve import resolve

BANDWIDTH_MEGABYTES = 256
"""Larger than any cache."""
ARITHMETIC = ("int8", "bf16", "fp32")
"""Kinds that the kernels multiply in: int8 dot products, bf16 ones, float32."""
LOW_MEMORY_BYTES = 1_000_000_000
LOW_DISK_BYTES = 1_000_000_000

DESCRIPTION = """\
Show CPU features, threads, the chosen kernels with the reason, and the machine's roofline: memory
bandwidth and arithmetic by kind, measured in about two seconds. With MODEL: what share of the
roofline it reaches in decode and prefill. Exit code 1 if something stands in the way.

  twostep doctor smollm2-135m --plot roofline.svg
"""


class Native(Protocol):
    """What doctor asks of the native library."""

    def cpu_info(self, isa: str = "") -> dict[str, Any]:
        """The chosen instruction set (``isa``), the ``reason``, and what the CPU has.

        ``isas`` lists the kernels that can run here, ``features`` the CPU's features. ``isa``
        forces a choice; raises ValueError if that cannot run here.
        """
        ...

    def measure_bandwidth(self, num_threads: int, megabytes: int) -> float:
        """GB/s that the threads together read from memory."""
        ...

    def measure_peak(self, isa: str, kind: str, num_threads: int) -> float:
        """GOP/s of one kind of arithmetic in registers, all threads together."""
        ...


def import_native() -> Native | str:
    """The native library, or why it cannot be loaded."""
    try:
        import twostep._native as native
    except ImportError as error:
        return " ".join(str(error).split())
    library: Native = native
    return library


def run(argv: list[str], native: Native | str | None = None) -> int:
    """Run the command; returns the exit code. ``native`` is for tests."""
    parser = cli_args.Parser("twostep doctor", "[MODEL]", DESCRIPTION)
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("-t", "--threads", type=cli_args.positive_size, metavar="N")
    parser.add_argument("--plot", metavar="FILE", help="draw the roofline: .svg or .png")
    parser.add_argument(
        "-q", "--quantization", metavar="TYPE", help="quantise MODEL's weights at load"
    )
    args = parser.parse(argv)
    plot = None if args.plot is None else roofline_plot.check_plot(args.plot)
    model = None if args.model is None else resolve(args.model, reporter_for())
    machine = inspect_machine()
    found = examine(machine, import_native() if native is None else native, args.threads)
    if model is not None and found["kernels"] is not None:
        found["model"] = doctor_model.examine_model(
            model,
            args.model,
            found["roofline"],
            threads=found["threads"],
            quantization=args.quantization,
            isa=found["kernels"]["isa"],
            reporter=reporter_for(),
        )
    if plot is not None and found["roofline"] is not None:
        roofline_plot.draw(plot, found["cpu"], found["roofline"], found.get("model"))
    if args.json:
        console.print_json(found)
    else:
        print(console.table(rows(found)))
        if "model" in found:
            print(console.table(doctor_model.rows(found["model"])))
        for problem in found["problems"]:
            print(f"problem: {problem}", file=sys.stderr)
    return 1 if found["problems"] else 0


def examine(machine: Machine, native: Native | str, threads: int | None = None) -> dict[str, Any]:
    """All facts and problems, ready for JSON. Memory in bytes, bandwidth in GB/s."""
    threads = threads or machine.usable_cpus
    problems = machine_problems(machine)
    kernels: dict[str, Any] | None = None
    roofline: dict[str, Any] | None = None
    if isinstance(native, str):
        problems.append(
            f"the native library cannot be loaded ({native}): run `pip install .` again"
        )
    else:
        kernels = choose_kernels(native, problems)
        roofline = measure_roofline(native, kernels["isa"], threads)
    return {
        "twostep": twostep.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": machine.cpu_model,
        "logical_cpus": machine.logical_cpus,
        "affinity_cpus": machine.affinity_cpus,
        "cgroup_cpus": machine.cgroup_cpus,
        "threads": threads,
        "threads_reason": threads_reason(machine, threads),
        "kernels": kernels,
        "memory_bandwidth_gb_s": roofline and roofline["bandwidth_gb_s"][str(threads)],
        "roofline": roofline,
        "total_memory": machine.total_memory,
        "available_memory": machine.available_memory,
        "cgroup_memory": machine.cgroup_memory,
        "store": str(store.folder()),
        "store_free": free_space(store.folder()),
        "problems": problems,
    }


def choose_kernels(native: Native, problems: list[str]) -> dict[str, Any]:
    """What the engine would choose; a forced choice that cannot run adds a problem."""
    try:
        return native.cpu_info(os.environ.get("TWOSTEP_CPU_ISA", ""))
    except ValueError as error:
        problems.append(str(error))
        return native.cpu_info()


def measure_roofline(native: Native, isa: str, threads: int) -> dict[str, Any]:
    """``bandwidth_gb_s`` by threads; ``gop_s`` by kind of arithmetic, then by threads.

    For 1, 2, 4, … and all threads. Keys are text, as in JSON.
    """
    counts = thread_counts(threads)
    return {
        "bandwidth_gb_s": {
            str(n): round(native.measure_bandwidth(n, BANDWIDTH_MEGABYTES), 2) for n in counts
        },
        "gop_s": {
            kind: {str(n): round(native.measure_peak(isa, kind, n), 1) for n in counts}
            for kind in ARITHMETIC
        },
    }


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4, … up to and with ``threads``."""
    counts = [1 << power for power in range(threads.bit_length())]
    return counts if counts[-1] == threads else [*counts, threads]


def threads_reason(machine: Machine, threads: int) -> str:
    """Why that many threads."""
    if threads != machine.usable_cpus:
        return "asked for"
    if machine.usable_cpus < machine.affinity_cpus:
        return f"cgroup quota of {machine.cgroup_cpus:g} cores"
    if machine.affinity_cpus < machine.logical_cpus:
        return f"CPU affinity: {machine.affinity_cpus} of {machine.logical_cpus} cores"
    return "all cores"


def machine_problems(machine: Machine) -> list[str]:
    """What would make the engine slow or fail, each with its cure."""
    problems = []
    available = machine.available_memory
    if available is not None and available < LOW_MEMORY_BYTES:
        problems.append(
            f"only {format_bytes(available)} of memory are free: close programs, or choose a small "
            "model and --max-model-len"
        )
    free = free_space(store.folder())
    if free is not None and free < LOW_DISK_BYTES:
        problems.append(
            f"only {format_bytes(free)} are free where models are kept ({store.folder()}): "
            "free some or set TWOSTEP_HOME"
        )
    return problems


def free_space(folder: Path) -> int | None:
    """Free bytes of the disk that a folder is on, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table for people."""
    kernels = found["kernels"]
    quota = found["cgroup_cpus"]
    limit = found["cgroup_memory"]
    chosen = "none"
    if kernels is not None:
        chosen = f"{kernels['isa']} ({kernels['reason']}; can run {', '.join(kernels['isas'])})"
    return [
        ["twostep", f"{found['twostep']} on Python {found['python']}, {found['platform']}"],
        ["cpu", found["cpu"]],
        ["features", " ".join(kernels["features"]) if kernels is not None else "unknown"],
        ["kernels", chosen],
        ["threads", f"{found['threads']} ({found['threads_reason']})"],
        ["quota", "none" if quota is None else f"{quota:g} cores"],
        *roofline_rows(found["roofline"]),
        [
            "memory",
            f"{bytes_or_unknown(found['available_memory'])} free of "
            f"{bytes_or_unknown(found['total_memory'])}"
            + ("" if limit is None else f", cgroup limit {format_bytes(limit)}"),
        ],
        ["models", f"{found['store']} ({bytes_or_unknown(found['store_free'])} free)"],
    ]


def roofline_rows(roofline: dict[str, Any] | None) -> list[list[str]]:
    """Bandwidth, then each kind of arithmetic."""
    if roofline is None:
        return [["bandwidth", "not measured"]]

    def by_threads(values: dict[str, float], unit: str) -> str:
        parts = [
            f"{value:.1f} {unit} ({n} thread{'s'[: int(n) > 1]})" for n, value in values.items()
        ]
        return ", ".join(parts) + ", measured"

    lines = [["bandwidth", by_threads(roofline["bandwidth_gb_s"], "GB/s")]]
    return lines + [
        [f"{kind} peak", by_threads(values, "GOP/s")] for kind, values in roofline["gop_s"].items()
    ]


def bytes_or_unknown(count: int | None) -> str:
    """A size for people."""
    return "unknown" if count is None else format_bytes(count)
