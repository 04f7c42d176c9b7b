"""Speed of the native matrix products: GOPS and GB/s by format, shape and number of rows.

    python benchmarks/kernels/linear.py [--threads 2] [--formats Q4_0,Q8_0] [--rows 1,8] [--cached]

A plan multiplies with as many copies of a weight as make up 120 MB, so few rows read from memory;
``--cached`` uses one copy (what the kernels reach when memory does not bound them). Each figure is
the best of several rounds: on a shared machine the others only ever add time. ``--cpu-time`` counts
processor time instead of the clock's, for one thread on a machine that is busy.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from twostep import _native as native
from twostep.ops import formats

SHAPES = "3072x576,2048x2048,2048x8192,28672x4096"
ROWS = "1,2,4,8,16,32,128"


def random_part(rng: np.random.Generator, name: str, n: int, k: int) -> Any:
    """Random blocks; scales are small numbers, so nothing overflows."""
    entry = formats.FORMATS[name]
    data = rng.integers(0, 256, formats.packed_bytes(name, (n, k)), dtype=np.uint8)
    blocks = data.view(entry.layout)
    for field in ("d", "m") if entry.is_quantized else ("v",):
        if field in entry.layout.names:
            blocks[field] = 0x3C00 if entry.layout[field] == np.uint16 else 0.01
    return name, n, k, data


def make_step(device: Any, rows: int) -> Any:
    one = np.array([rows], dtype=np.int32)
    none = np.zeros(0, dtype=np.int32)
    return native.make_step(
        device,
        rows,
        np.array([0, rows], dtype=np.int32),
        one,
        np.zeros(1, dtype=np.int32),
        none,
        none,
        np.zeros((1, rows), dtype=np.int32),
        1,
    )


class Case:
    """One weight, in copies, and plans over it."""

    def __init__(
        self, device: Any, name: str, n: int, k: int, precision: str, cached: bool
    ) -> None:
        raw = random_part(np.random.default_rng(0), name, n, k)
        self.device, self.n, self.k = device, n, k
        first = native.Weight(device, [raw], precision, 2)
        copies = 1 if cached else max(1, round(120e6 / first.nbytes))
        self.weights = [first]
        self.weights += [native.Weight(device, [raw], precision, 2) for _ in range(copies - 1)]

    def seconds(self, stream: Any, rows: int, budget: float, cpu_time: bool) -> float:
        """Best time of one product of ``rows`` rows."""
        step = make_step(self.device, rows)
        act = native.ActBuffer(self.weights[0].act_form, self.k, rows)
        out = native.Rows(self.n, rows)
        source = native.Rows(self.k, rows)
        source.numpy()[:] = np.random.default_rng(1).standard_normal((rows, self.k))
        fill = native.Plan()
        native.add_put_rows(fill, self.device, source, native.RowSet.Tokens, [act])
        stream.wait(stream.launch(fill, step))
        # Many rows are paced by arithmetic: a few copies do.
        expected = rows * self.n * self.k * 2 / 200e9
        count = max(1, min(len(self.weights), round(0.02 / expected)))
        repeats = max(1, round(0.001 / expected / count)) if len(self.weights) == 1 else 1
        plan = native.Plan()
        for i in range(count * repeats):
            weight = self.weights[i % count]
            native.add_linear(plan, self.device, act, weight, None, out)
        clock = time.process_time if cpu_time else time.perf_counter
        best = float("inf")
        end = time.perf_counter() + budget
        for _ in range(100):
            start = clock()
            stream.wait(stream.launch(plan, step))
            best = min(best, clock() - start)
            if time.perf_counter() > end:
                break
        return best / (count * repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--isa", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", default="Q4_0,Q4_1,Q4_K,Q6_K,Q8_0,BF16")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--precision", default="int8", choices=["int8", "bf16"])
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--budget", type=float, default=0.4, help="seconds for each figure")
    args = parser.parse_args()
    device, stream = native.make_device(args.isa), native.Stream(args.threads)
    rows = [int(r) for r in args.rows.split(",")]
    bandwidth = native.measure_bandwidth(args.threads, 256)
    print(f"{device.isa}, {args.threads} threads, memory reads at {bandwidth:.1f} GB/s")
    print("GOPS (2 x N x K x rows), and GB/s of packed weights at 1 row")
    print(
        f"{'N x K':>12} {'format':>6} {'GB/s':>6} " + " ".join(f"{'M=' + str(r):>6}" for r in rows)
    )
    for shape in args.shapes.split(","):
        n, k = (int(s) for s in shape.split("x"))
        for name in args.formats.split(","):
            case = Case(device, name, n, k, args.precision, args.cached)
            times = [case.seconds(stream, r, args.budget, args.cpu_time) for r in rows]
            gops = [2e-9 * n * k * r / t for r, t in zip(rows, times, strict=True)]
            rate = case.weights[0].nbytes / times[0] / 1e9 * (rows[0] == 1)
            figures = " ".join(f"{g:6.0f}" for g in gops)
            print(f"{shape:>12} {name:>6} {rate:6.1f} {figures}", flush=True)


if __name__ == "__main__":
    main()
