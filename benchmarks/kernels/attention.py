"""Time of paged attention alone, for SmolLM2-135M's shape: 9 heads, 3 KV heads, 64 wide, 30 layers.

python benchmarks/kernels/attention.py [--isa avx2] [--threads 2] [--dtype fp16] [--blocks turns]

Decode: every sequence adds one token to its context; GB/s counts the KV that a step has to read.
Prefill: 512 tokens of one sequence behind `position` computed ones; GFLOP/s counts the products
of visible (query, key) pairs. The best of some repetitions, rope and KV write included.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import numpy as np

from twostep import _native as native

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
WIDTH = HEADS * HEAD_DIM
QKV_WIDTH = WIDTH + 2 * KV_HEADS * HEAD_DIM
MAX_POSITION = 8192


class Bench:
    """All layers' attention, recorded as one plan; the layers share their input."""

    def __init__(self, isa: str, num_threads: int, dtype: str, num_blocks: int, order: str) -> None:
        self.device = native.make_device(isa)
        self.dtype = dtype or native.default_kv_dtype(self.device)
        self.num_threads = num_threads
        cache = native.KVCache(
            self.device, LAYERS, KV_HEADS, HEAD_DIM, num_blocks, dtype=self.dtype
        )
        self.qkv, out = native.Rows(QKV_WIDTH, 512), native.Rows(WIDTH, 512)
        inv_freq = 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = np.arange(MAX_POSITION)[:, None] * inv_freq
        rope = native.RopeTable(*(f(angles).astype(np.float32) for f in (np.cos, np.sin)))
        self.plan, self.write_plan = native.Plan(), native.Plan()
        for layer in range(LAYERS):
            for plan in (self.plan, self.write_plan):
                added = native.add_rope_cache(
                    plan, self.device, cache, layer, self.qkv, None, rope,
                    num_heads=HEADS, scale=HEAD_DIM**-0.5, interleaved=True,
                )  # fmt: skip
                if plan is self.plan:
                    native.add_attention(
                        plan, self.device, cache, layer, None, rope=added,
                        num_heads=HEADS, num_threads=num_threads, rows=out,
                    )  # fmt: skip
        self.stream = native.Stream(num_threads)
        self.qkv.numpy()[:] = np.random.default_rng(0).standard_normal(
            self.qkv.numpy().shape, np.float32
        )

        self.ids = np.arange(num_blocks, dtype=np.int32)
        self.takes_turns = False
        for first in range(1, num_blocks - 31, 32):  # write it all: unwritten pages cost no reading
            self.launch(self.write_plan, 1, 512, 512, first)
        self.takes_turns = order == "turns"
        if order == "scatter":  # as a cache is after a while
            self.ids[1:] = np.random.default_rng(1).permutation(self.ids[1:])

    def launch(self, plan: Any, batch: int, tokens: int, seq_len: int, first_block: int) -> float:
        """Seconds of one step of `batch` sequences with `tokens` new tokens each."""
        blocks = (seq_len + 15) // 16
        table = self.ids[first_block : first_block + batch * blocks]
        if self.takes_turns:  # sequences that grow side by side
            table = np.ascontiguousarray(table.reshape(blocks, batch).T)
        step = native.make_step(
            self.device, batch * tokens,
            np.arange(0, batch * tokens + 1, tokens, dtype=np.int32),
            np.full(batch, seq_len, np.int32), np.arange(batch, dtype=np.int32),
            np.zeros(0, np.int32), np.zeros(0, np.int32), table.reshape(batch, blocks), 16,
        )  # fmt: skip
        start = time.perf_counter()
        self.stream.wait(self.stream.launch(plan, step))
        return time.perf_counter() - start

    def run(self, batch: int, tokens: int, seq_len: int) -> float:
        return self.launch(self.plan, batch, tokens, seq_len, 1)

    def best(self, repetitions: int, *args: int) -> float:
        return min(self.run(*args) for _ in range(repetitions))

    def profile(self, *args: int) -> dict[str, float]:
        """Milliseconds by op of one step."""
        self.stream.set_profile(True)
        self.run(*args)
        self.stream.set_profile(False)
        return {name: round(ns / 1e6, 3) for name, (ns, _) in self.stream.profile().items()}


def decode(bench: Bench, batch: int, context: int, repetitions: int) -> dict[str, Any]:
    seconds = bench.best(repetitions, batch, 1, context)
    element = 4 if bench.dtype == "fp32" else 2
    read = LAYERS * KV_HEADS * HEAD_DIM * 2 * element * batch * context
    return {
        "case": f"decode B={batch} context={context}",
        "ms": seconds * 1e3,
        "gb_per_s": read / seconds / 1e9,
        "profile": bench.profile(batch, 1, context),
    }


def prefill(bench: Bench, position: int, repetitions: int) -> dict[str, Any]:
    seconds = bench.best(repetitions, 1, 512, position + 512)
    pairs = 512 * position + 512 * 513 // 2
    return {
        "case": f"prefill 512 at {position}",
        "ms": seconds * 1e3,
        "gflop_per_s": LAYERS * HEADS * HEAD_DIM * 4 * pairs / seconds / 1e9,
        "profile": bench.profile(1, 512, position + 512),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--blocks", choices=("runs", "turns", "scatter"), default="runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.isa, args.threads, args.dtype, 16 * 256 + 1, args.blocks)
    results = []
    for context, batches in ((192, (1, 8, 16, 32)), (1024, (1, 8, 16, 32)), (4096, (1, 8, 16))):
        for batch in batches:
            results.append(decode(bench, batch, context, args.repetitions))
    for position in (0, 2048):
        results.append(prefill(bench, position, args.repetitions))
    head = {"isa": bench.device.isa, "threads": args.threads, "dtype": bench.dtype}
    if args.json:
        print(json.dumps({**head, "results": results}))
        return
    print(head)
    for r in results:
        rate = next(f"{r[k]:6.1f} {k}" for k in ("gb_per_s", "gflop_per_s") if k in r)
        print(f"{r['case']:28} {r['ms']:9.3f} ms  {rate}  {r['profile']}")


if __name__ == "__main__":
    main()
