"""How the time of a step grows with what is in it: sequences, context, tokens of a prompt.

    python -m benchmarks.growth [MODEL ...] [--sequences 40] [--prompt 100] [--contexts 128 512 …]
        [--rounds 5] [--out DIR]

Four sweeps through ``LLM.step``, sampling on: decode steps of 1, 2, … sequences with short
contexts; decode steps of one and of eight sequences behind longer and longer contexts; prompts of
1, 2, … tokens in one step. Rounds go over all sizes in an order of their own, so that a slow minute
touches any of them. A size's figure is the median over the rounds of each round's lower quartile:
neighbours only add.

A **cliff** is a size whose step is more than 10 % slower per token than that of the size before;
tiles of the kernels have their edges there. What looks like one is measured again, in turns with
the size before, and the median ratio counts. Written to DIR (default
``benchmarks/results/DATE-growth``): ``growth.json``, ``growth.md``, and a chart for each model as
PNG and SVG. Exit code 1 if there is a cliff.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from twostep import LLM, SamplingParams
from twostep.contracts.sampling import RequestOutputKind

CLIFF = 1.10
"""Times the time per token of one token less."""
SUSPECT = 1.05
"""From here on a size is measured again."""
IN_TURNS = 9
"""Rounds of that."""
STEPS = 16
"""Timed decode steps of a size in a round."""
WARM_UP = 3
SHORT_CONTEXT = 32
BESIDE = 8
"""Sequences of the second sweep over contexts."""
COUNT_TOKENS = ("sequences", "prompt")
"""Sweeps over the number of tokens in a step."""
SWEEPS = {
    "sequences": "sequences that decode",
    "context": "tokens of context, one sequence decodes",
    "context of 8": "tokens of context, eight sequences decode",
    "prompt": "tokens of a prompt",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sweep:
    """Milliseconds of a step by size."""

    model: str
    name: str
    ms: dict[int, float]
    again: dict[int, float]
    """Time per token as a multiple of the size before, where it was measured in turns."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the size is the number of tokens in the step."""
        return self.name in COUNT_TOKENS

    def jumps(self) -> dict[int, float]:
        """Time per token of each size as a multiple of that of the size before."""
        if not self.counts_tokens:
            return {}
        return jumps(self.ms) | self.again

    def line(self) -> tuple[float, float]:
        """Milliseconds of nothing and of one more, by least squares."""
        sizes = list(self.ms)
        slope, start = statistics.linear_regression(sizes, [self.ms[size] for size in sizes])
        return start, slope


def jumps(ms: dict[int, float]) -> dict[int, float]:
    """Time per token of each size as a multiple of that of the size before."""
    return {size: ms[size] / size / (ms[size - 1] / (size - 1)) for size in ms if size - 1 in ms}


class Bench:
    """One model, and prompts that share nothing."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._vocab = llm._engine.config.vocab_size
        self._random = random.Random(7)

    def decode(self, count: int, context: int) -> list[float]:
        """Milliseconds of steps in which ``count`` sequences decode."""
        while_others_start = count * context // 64  # steps; those who are first decode meanwhile
        params = SamplingParams(
            temperature=0.8, top_p=0.95, ignore_eos=True,
            max_tokens=STEPS + WARM_UP + 20 + while_others_start,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        ids = [self._add(context, params) for _ in range(count)]
        decoding: set[str] = set()
        while len(decoding) < count:
            decoding.update(output.request_id for output in self._llm.step())
        for _ in range(WARM_UP):
            self._llm.step()
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            outputs = self._llm.step()
            times.append(1000 * (time.perf_counter() - begin))
            assert len(outputs) == count, "a sequence has ended, or waits"
        for request_id in ids:
            self._llm.abort(request_id)
        self._drain()
        return times

    def prompt(self, count: int) -> list[float]:
        """Milliseconds from a prompt of ``count`` tokens to its first token."""
        params = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, max_tokens=1)
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            self._add(count, params)
            self._drain()
            times.append(1000 * (time.perf_counter() - begin))
        return times

    def _add(self, count: int, params: SamplingParams) -> str:
        ids = [self._random.randrange(4, self._vocab - 4) for _ in range(count)]
        return self._llm.add_request({"prompt_token_ids": ids}, params)

    def _drain(self) -> None:
        while self._llm.has_unfinished_requests():
            self._llm.step()


def measure(model: str, args: argparse.Namespace) -> Iterator[Sweep]:
    """All sweeps of a model."""
    longest = max(args.contexts) + 512
    times: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in SWEEPS}
    with LLM(
        model,
        max_num_seqs=max(args.sequences, BESIDE),
        max_model_len=longest,
        threads=args.threads,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        enable_prefix_caching=False,
    ) as llm:
        bench = Bench(llm)
        bench.decode(args.sequences, SHORT_CONTEXT)  # its memory is touched once, unseen
        run: dict[str, Callable[[int], list[float]]] = {
            "sequences": lambda count: bench.decode(count, SHORT_CONTEXT),
            "context": lambda context: bench.decode(1, context),
            "context of 8": lambda context: bench.decode(BESIDE, context),
            "prompt": bench.prompt,
        }
        cells = [("sequences", count) for count in range(1, args.sequences + 1)]
        cells += [("context", context) for context in args.contexts]
        cells += [("context of 8", n) for n in args.contexts if n <= args.most_beside]
        cells += [("prompt", count) for count in range(1, args.prompt + 1)]
        for number in range(args.rounds):
            show(f"{model}: round {number + 1} of {args.rounds}")
            for name, size in random.Random(number).sample(cells, len(cells)):
                times[name][size].append(quartile(run[name](size)))
        for name, sizes in times.items():
            ms = {size: statistics.median(sizes[size]) for size in sorted(sizes)}
            suspects = [size for size, jump in jumps(ms).items() if jump > SUSPECT]
            again = {}
            for size in suspects if name in COUNT_TOKENS else []:
                show(f"{model}: {SWEEPS[name]}: {size} again")
                again[size] = in_turns(run[name], size)
            yield Sweep(Path(model).name.removesuffix(".gguf"), name, ms, again)


def in_turns(run: Callable[[int], list[float]], size: int) -> float:
    """Time per token as a multiple of the size before: the median of rounds of both."""
    ratios = []
    for number in range(IN_TURNS):
        pair = {
            n: quartile(run(n)) / n for n in ((size, size - 1) if number % 2 else (size - 1, size))
        }
        ratios.append(pair[size] / pair[size - 1])
    return statistics.median(ratios)


def quartile(figures: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(figures)[len(figures) // 4]


def show(text: str) -> None:
    """What goes on, for people."""
    print(text, file=sys.stderr, flush=True)


def report(sweeps: Sequence[Sweep], facts: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"# Time of a step by what is in it ({place(facts)})",
        "",
        "| model | sweep | a step of none, ms | each one, ms | worst jump per token | cliffs |",
        "|---|---|---|---|---|---|",
    ]
    for sweep in sweeps:
        start, slope = sweep.line()
        jumps = sweep.jumps()
        worst = max(jumps, key=jumps.__getitem__) if jumps else 0
        jump = f"{jumps[worst] - 1:+.1%} at {worst}" if jumps else "-"
        cliffs = ", ".join(str(size) for size in cliffs_of(sweep)) or "none"
        lines.append(
            f"| {sweep.model} | {SWEEPS[sweep.name]} | {start:.2f} | {slope:.4f} | {jump} | "
            f"{cliffs if jumps else '-'} |"
        )
    for sweep in sweeps:
        unit = "µs per token" if sweep.counts_tokens else "ms per step"
        lines += ["", f"**{sweep.model}, {SWEEPS[sweep.name]}**, {unit}:", ""]
        lines.append(
            ", ".join(
                f"{size}: {1000 * ms / size:.0f}" if sweep.counts_tokens else f"{size}: {ms:.2f}"
                for size, ms in sweep.ms.items()
            )
        )
    return "\n".join(lines) + "\n"


def place(facts: dict[str, Any]) -> str:
    """Machine and date."""
    return f"{facts['cpu']}, {facts['kernels']}, {facts['threads']} threads, {facts['date']}"


def cliffs_of(sweep: Sweep) -> list[int]:
    """Sizes that are more than 10 % slower per token than the size before."""
    return [size for size, jump in sweep.jumps().items() if jump > CLIFF]


def draw(sweeps: Sequence[Sweep], facts: dict[str, Any], folder: Path) -> None:
    """A chart for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for model in dict.fromkeys(sweep.model for sweep in sweeps):
        own = [sweep for sweep in sweeps if sweep.model == model]
        figure, axes = pyplot.subplots(2, len(own), figsize=(4.6 * len(own), 6.4), squeeze=False)
        for (above, below), sweep in zip(axes.T, own, strict=True):
            sizes = list(sweep.ms)
            above.plot(sizes, list(sweep.ms.values()), ".-", color="#d62728")
            start, slope = sweep.line()
            above.plot(sizes, [start + slope * size for size in sizes], "--", color="#7f7f7f",
                       linewidth=1, label=f"{start:.2f} + {slope:.4f} n")  # fmt: skip
            above.set_ylim(bottom=0)
            above.set_title(f"ms of a step\n{SWEEPS[sweep.name]}", fontsize=9)
            above.legend(fontsize=8)
            below.axis("off")
            if sweep.counts_tokens:
                below.axis("on")
                below.plot(sizes, [1000 * sweep.ms[n] / n for n in sizes], ".-", color="#1f77b4")
                for size in cliffs_of(sweep):
                    below.axvline(size, color="#d62728", linewidth=1)
                below.set_yscale("log")
                below.set_title("µs per token (red: a cliff)", fontsize=9)
            for axis in (above, below):
                axis.grid(alpha=0.3)
        figure.suptitle(f"{model} on {place(facts)}", fontsize=10)
        figure.tight_layout()
        for suffix in ("png", "svg"):
            figure.savefig(folder / f"{model}.{suffix}", dpi=110)
        pyplot.close(figure)


def main() -> int:
    """Run the measurement; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["smollm2-135m"], metavar="MODEL")
    parser.add_argument("--sequences", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 7600]
    )
    parser.add_argument("--most-beside", type=int, default=2048, metavar="CONTEXT",
                        help="longest context of eight sequences")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sweeps = [sweep for model in args.models for sweep in measure(model, args)]
    facts = describe(args.threads)
    folder = args.out or Path(__file__).parent / "results" / f"{datetime.date.today()}-growth"
    folder.mkdir(parents=True, exist_ok=True)
    document = {"machine": facts, "sweeps": [dataclasses.asdict(sweep) for sweep in sweeps]}
    (folder / "growth.json").write_text(json.dumps(document, indent=2) + "\n")
    text = report(sweeps, facts)
    (folder / "growth.md").write_text(text)
    draw(sweeps, facts, folder)
    print(text)
    return 1 if any(cliffs_of(sweep) for sweep in sweeps) else 0


if __name__ == "__main__":
    sys.exit(main())
