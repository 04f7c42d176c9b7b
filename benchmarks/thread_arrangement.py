"""Which thread does what: three ways to share few cores between planning and computing.

    python benchmarks/thread_arrangement.py [MODEL] [--streams 1 8 32] [--steps 100] [--rounds 7]

With N compute threads (by default the usable cores):

- ``joins``: N - 1 threads of the stream's own; the engine's thread computes while it waits:
  what the engine does (docs/adr/0001-the-waiter-joins-the-stream.md).
- ``extra``: N threads of the stream's own; the engine's thread plans and waits beside them.
- ``fewer``: N - 1 threads of the stream's own; the engine's thread has the last core for itself.

All three engines are loaded at once and take turns; who waits for a turn sleeps. Tokens per second:
median of the rounds, and their range. For a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import Any

from twostep import LLM, SamplingParams
from twostep import _native as native
from twostep.contracts.sampling import RequestOutputKind
from twostep.entrypoints.machine import inspect_machine

WARM_UP_STEPS = 10
PROMPT_TOKENS = 512


@contextmanager
def streams_made_with(caller_joins: bool) -> Any:
    """While this lasts, a new engine's stream is of this kind."""
    real = native.Stream
    native.Stream = lambda num_threads: real(num_threads, caller_joins)
    try:
        yield
    finally:
        native.Stream = real


def load(model: str, num_threads: int, *, caller_joins: bool, max_num_seqs: int) -> LLM:
    """An engine of one arrangement."""
    with streams_made_with(caller_joins):
        return LLM(
            model,
            threads=num_threads,
            max_num_seqs=max_num_seqs,
            max_model_len=2048,
            kv_cache_memory_bytes=1 << 29,
            enable_prefix_caching=False,
        )


def decode_speed(llm: LLM, count: int, num_steps: int) -> float:
    """Tokens per second of so many streams."""
    params = SamplingParams(
        temperature=0.8,
        max_tokens=WARM_UP_STEPS + num_steps + 20,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    ids = [
        llm.add_request({"prompt_token_ids": [number + 5] * 16}, params) for number in range(count)
    ]
    for _ in range(WARM_UP_STEPS):
        llm.step()
    begin = time.perf_counter()
    for _ in range(num_steps):
        llm.step()
    seconds = time.perf_counter() - begin
    for request_id in ids:
        llm.abort(request_id)
    while llm.has_unfinished_requests():
        llm.step()
    return count * num_steps / seconds


def prefill_speed(llm: LLM, _count: int, _num_steps: int) -> float:
    """Prompt tokens per second."""
    begin = time.perf_counter()
    llm.generate(
        {"prompt_token_ids": [7] * PROMPT_TOKENS}, SamplingParams(max_tokens=1), use_tqdm=False
    )
    return PROMPT_TOKENS / (time.perf_counter() - begin)


def main() -> int:
    """Run the measurement; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=inspect_machine().usable_cpus)
    args = parser.parse_args()
    arrangements = {"joins": (args.threads, True), "extra": (args.threads, False)}
    if args.threads > 1:
        arrangements["fewer"] = (args.threads - 1, False)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                load(args.model, threads, caller_joins=joins, max_num_seqs=max(args.streams))
            )
            for name, (threads, joins) in arrangements.items()
        }
        print(f"{args.model}, {args.threads} threads, tokens/s\n")
        print("| | " + " | ".join(engines) + " |\n|---|" + "---|" * len(engines))
        cells = [(f"decode, {count}", decode_speed, count) for count in args.streams]
        for label, measure, count in [*cells, ("prefill", prefill_speed, 1)]:
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(args.rounds):
                for name, llm in engines.items():
                    speeds[name].append(measure(llm, count, args.steps))
            row = [
                f"{statistics.median(found):.0f} ({min(found):.0f} - {max(found):.0f})"
                for found in speeds.values()
            ]
            print(f"| {label} | " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
