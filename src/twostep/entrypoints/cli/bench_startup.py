"""``twostep bench startup``: from the start of a process to its first token, cold and warm.

Each start is a process of its own (``startup_child``). Before a cold one the model's files are
dropped from the system's page cache; what is left of them there is reported, for another program
that has a file mapped keeps it in. Programs and libraries stay cached: a machine that has just
been switched on is slower still.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostep.contracts.errors import TwostepError
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli.bench_engine import (
    Clock,
    deliver,
    find_model,
    make_parser,
    model_named,
    percentiles,
)
from twostep.entrypoints.progress import Reporter, reporter_for

DESCRIPTION = """\
Start the engine in fresh processes and time until the first token of a short prompt: cold (the
model's files dropped from the page cache) and warm. With peak memory and the phases of a start.

  twostep bench startup smollm2-135m --num-iters-warm 5
"""
PAGE = mmap.PAGESIZE

Start = Callable[[Path, dict[str, Any]], dict[str, Any]]
"""(model's path, options of ``LLM``) → what ``startup_child`` reports."""


def run(argv: list[str], start: Start | None = None, clock: Clock = time.monotonic) -> int:
    """Run the bench; returns the exit code. The callables are for tests."""
    parser = make_parser("startup", DESCRIPTION)
    add = parser.add_argument
    add("--num-iters-cold", type=cli_args.size, default=3, metavar="N", help="default: 3")
    add("--num-iters-warmup", type=cli_args.size, default=1, metavar="N", help="default: 1")
    add("--num-iters-warm", type=cli_args.positive_size, default=3, metavar="N", help="default: 3")
    args = parser.parse(argv)

    reporter = reporter_for()
    model = find_model(args, reporter)
    options = cli_args.engine_options(args)
    results = measure(args, model.path, options, start or start_process, clock, reporter)
    results = {"model_id": model_named(args), **results}
    deliver(results, lines(results), args)
    return 0


def measure(
    args: argparse.Namespace,
    path: Path,
    options: dict[str, Any],
    start: Start,
    clock: Clock,
    reporter: Reporter,
) -> dict[str, Any]:
    """All starts; results under vLLM's names."""
    files = model_files(path)
    results: dict[str, Any] = {}
    resident = []
    cold = []
    with reporter.count("cold starts", args.num_iters_cold, "starts") as advance:
        for number in range(args.num_iters_cold):
            resident.append(drop_from_page_cache(files))
            cold.append(one_start(path, options, start, clock))
            advance(number + 1)
    for _ in range(args.num_iters_warmup):
        one_start(path, options, start, clock)
    warm = []
    with reporter.count("warm starts", args.num_iters_warm, "starts") as advance:
        for number in range(args.num_iters_warm):
            warm.append(one_start(path, options, start, clock))
            advance(number + 1)
    if cold:
        results |= summarise("cold", cold)
        results["cold_resident_fraction"] = max(resident)
    return results | summarise("warm", warm)


def one_start(path: Path, options: dict[str, Any], start: Start, clock: Clock) -> dict[str, Any]:
    """A start and its total time; the child's clock is the same (CLOCK_MONOTONIC)."""
    began = clock()
    report = start(path, options)
    phases = {"interpreter": report["entered"] - began, **report["phases"]}
    return {
        "seconds": report["first_token"] - began,
        "peak_rss_bytes": report["peak_rss_bytes"],
        "phases": phases,
    }


def start_process(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Run ``startup_child``; raises TwostepError with its last line if it fails."""
    message = json.dumps({"path": str(path), "options": options})
    command = [sys.executable, "-m", "twostep.entrypoints.cli.startup_child", message]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise TwostepError(f"the engine did not start ({done.returncode}): {words[0]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def summarise(kind: str, starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds, and bytes of memory; phases are medians."""
    times = [each["seconds"] for each in starts]
    return {
        f"avg_{kind}_startup_time": statistics.fmean(times),
        f"{kind}_startup_times": times,
        f"{kind}_startup_percentiles": percentiles(times),
        f"{kind}_peak_rss_bytes": max(each["peak_rss_bytes"] for each in starts),
        f"{kind}_phases": {
            phase: statistics.median(each["phases"][phase] for each in starts)
            for phase in starts[0]["phases"]
        },
    }


def lines(results: dict[str, Any]) -> list[str]:
    """For people."""
    found = []
    for kind in ("cold", "warm"):
        if f"avg_{kind}_startup_time" not in results:
            continue
        times = results[f"{kind}_startup_times"]
        phases = ", ".join(
            f"{name} {seconds:.2f}" for name, seconds in results[f"{kind}_phases"].items()
        )
        found.append(
            f"{kind}: first token after {statistics.median(times):.2f} s "
            f"({min(times):.2f} - {max(times):.2f}), "
            f"peak memory {results[f'{kind}_peak_rss_bytes'] / 1e6:.0f} MB"
        )
        found.append(f"  {phases}")
    if results.get("cold_resident_fraction", 0) > 0.01:
        found.append(
            f"{results['cold_resident_fraction']:.0%} of the model stayed in the page cache: "
            "another program has it mapped, so cold starts were not cold"
        )
    return found


# -- the page cache -------------------------------------------------------------------------------


def model_files(path: Path) -> list[Path]:
    """The files that a start reads."""
    return [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())


def drop_from_page_cache(files: list[Path]) -> float:
    """Ask the system to forget the files; returns the fraction of their pages still in memory."""
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())  # pages that are not on disk yet cannot be dropped
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pages = [count_pages(file) for file in files]
    total = sum(count for _, count in pages)
    return sum(resident for resident, _ in pages) / total if total else 0.0


def count_pages(file: Path) -> tuple[int, int]:
    """(pages of a file in memory, pages in all), by mincore(2)."""
    size = file.stat().st_size
    if size == 0:
        return 0, 0
    count = -(-size // PAGE)
    states = (ctypes.c_ubyte * count)()
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), size, mmap.MAP_PRIVATE) as view:
        start = (ctypes.c_char * size).from_buffer(view)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), states)
        del start  # or the map cannot be closed
        if failed:
            raise TwostepError(f"cannot see the page cache of {file}: errno {ctypes.get_errno()}")
    return sum(state & 1 for state in states), count
