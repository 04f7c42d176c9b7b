"""From nothing to the first token: whole processes, timed from outside.

    python benchmarks/start.py MODEL.gguf [--rounds 5]

Reports the median and range of ``twostep complete`` with one token (the model's file in the page
cache) and of ``twostep --help``, and the peak memory of the former.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time


def main() -> int:
    """Run the measurement; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    complete = ["complete", args.model, "The capital of France is", "--max-tokens", "1"]
    for name, words in (("complete, first token", complete), ("--help", ["--help"])):
        seconds = [timed(words) for _ in range(args.rounds + 1)][1:]  # the first warms the caches
        print(
            f"{name:22} {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f} - {max(seconds):.2f})"
        )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"peak memory            {peak / 1024:.0f} MiB")
    return 0


def timed(words: list[str]) -> float:
    """Seconds of one ``twostep`` process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "twostep", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
