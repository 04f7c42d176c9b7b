"""What a decode step costs the engine's thread besides the model: CPU time, part by part.

    python benchmarks/host_path.py [MODEL ...] [--streams 1 8 32] [--steps 200] [--sync] [--stop]

Runs the real engine, ``LLM.step`` and all, with streams that decode one token each. A MODEL is
what ``LLM`` takes, or ``tiny``: a random checkpoint of the tests whose device is nearly free, so
that the host's code stays in the caches. A real model's weights drive it out of them, and the same
code takes three times as long: both are worth knowing.

Figures are CPU time of the engine's thread (``CLOCK_THREAD_CPUTIME_ID``): what others do on the
machine stretches no step, it only costs caches. The wait for the device, in which the thread
computes, is not counted; it is all that is not. First quartiles over the steps of all rounds, as
neighbours only add. ``whole`` is measured in rounds of their own, with no clock inside the step but
the two around the wait; the parts have the cost of their clock readings taken off.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from twostep import LLM, SamplingParams
from twostep.contracts.sampling import RequestOutputKind

WARM_UP_STEPS = 30
ROUNDS = 4
PARTS = ("schedule", "launch", "sampling", "result", "update", "client", "front end")


class Marks:
    """CPU time between moments of a step, by the name of the part that ends there."""

    def __init__(self) -> None:
        self.parts: dict[str, list[int]] = defaultdict(list)
        self._last = 0
        self.cost = 0
        """Nanoseconds of one mark; taken off each part."""

    def calibrate(self) -> None:
        """Find out what a mark itself costs."""
        for _ in range(2000):
            self("mark")
        self.cost = round(statistics.median(self.parts.pop("mark")))

    def begin(self) -> None:
        """What was before belongs to no part."""
        self._last = time.thread_time_ns()

    def __call__(self, part: str) -> None:
        now = time.thread_time_ns()
        self.parts[part].append(now - self._last - self.cost)
        self._last = time.thread_time_ns()


class PartObserver:
    """A ``StepObserver`` that marks every stop."""

    def __init__(self, mark: Marks) -> None:
        self._mark = mark

    def called(self, method: Any, args: Any) -> None:
        """Not part of a step."""

    def step_started(self) -> None:
        """The client has called the core."""
        self._mark("client")

    def scheduled(self, plan: Any) -> None:
        """Planned."""
        self._mark("schedule")

    def launched(self, plan: Any) -> None:
        """Inputs are prepared, the forward pass is queued."""
        self._mark("launch")

    def sampling_launched(self, plan: Any, grammar_output: Any) -> None:
        """Logits and sampling are queued."""
        self._mark("sampling")

    def waiting(self, plan: Any) -> None:
        """What is between two stops is the core's own."""
        self._mark("client")

    def result_arrived(self, plan: Any, output: Any) -> None:
        """The result is converted; the wait before it was marked by the stream."""
        self._mark("result")

    def step_failed(self, plans: Any, reason: str, is_fault: bool) -> None:
        """A failed step cannot be measured."""
        raise RuntimeError(reason)

    def updated(self, plan: Any, outputs: Any) -> None:
        """The scheduler has taken the result."""
        self._mark("update")

    def step_finished(self, executed: bool) -> None:
        """Back to the client."""


class WatchedStream:
    """The native stream, with the engine thread's clock read before and after each wait."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.waited = 0
        """Nanoseconds of CPU time inside waits."""
        self.launch, self.done = stream.launch, stream.done
        self.mark: Marks | None = None

    def wait(self, ticket: int) -> None:
        """Wait for a launch."""
        if self.mark is not None:
            self.mark("result")
        begin = time.thread_time_ns()
        self._stream.wait(ticket)
        self.waited += time.thread_time_ns() - begin
        if self.mark is not None:
            self.mark.begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU time per step."""

    model: str
    streams: int
    is_async: bool
    whole: float
    least: float
    """The cheapest step."""
    wait: float
    """In the wait, computing: not part of ``whole``."""
    parts: dict[str, float]


def measure(model: str, path: str, args: argparse.Namespace) -> list[Cost]:
    """All numbers of streams on one engine."""
    with LLM(
        path,
        async_scheduling=not args.sync,
        max_num_seqs=max(args.streams),
        max_model_len=256 if model == "tiny" else 2048,
        kv_cache_memory_bytes=1 << 29,
    ) as llm:
        return [measure_streams(llm, model, count, args) for count in args.streams]


def measure_streams(llm: LLM, model: str, count: int, args: argparse.Namespace) -> Cost:
    """So many streams."""
    device = llm._engine.model
    stream = device.stream
    watched = WatchedStream(stream)
    device.stream = watched
    core = llm._client.engine_core
    whole: list[int] = []
    waits: list[int] = []
    marks = Marks()
    marks.calibrate()
    for number in range(2 * ROUNDS):
        by_part = number % 2 == 1
        ids = start_streams(llm, count, args)
        for _ in range(WARM_UP_STEPS):
            llm.step()
        if by_part:
            core.observer, watched.mark = PartObserver(marks), marks
        for _ in range(args.steps // ROUNDS):
            before = watched.waited
            begin = time.thread_time_ns()
            if by_part:
                marks.begin()
            outputs = llm.step()
            if by_part:
                marks("front end")
            else:
                whole.append(time.thread_time_ns() - begin - (watched.waited - before))
                waits.append(watched.waited - before)
            assert len(outputs) == count or args.final, "a stream has ended"
        core.observer = watched.mark = None
        for request_id in ids:
            llm.abort(request_id)
        while llm.has_unfinished_requests():
            llm.step()
    device.stream = stream
    # A step of the parts' rounds has several marks of some parts: their sum is what a step costs.
    steps = len(marks.parts["front end"])
    parts = {
        part: quartile(marks.parts[part]) * len(marks.parts[part]) / steps / 1000 for part in PARTS
    }
    clocks = 2 * clock_cost()
    return Cost(
        model=model,
        streams=count,
        is_async=not args.sync,
        whole=(quartile(whole) - clocks) / 1000,
        least=(min(whole) - clocks) / 1000,
        wait=statistics.median(waits) / 1000,
        parts=parts,
    )


def start_streams(llm: LLM, count: int, args: argparse.Namespace) -> list[str]:
    """Requests that decode; those of later rounds have other prompts."""
    llm.reset_prefix_cache()
    params = SamplingParams(
        temperature=0.8,
        max_tokens=WARM_UP_STEPS + args.steps // ROUNDS + 20,
        ignore_eos=True,
        stop=["\n\nQ:", "</answer>"] if args.stop else None,
        output_kind=RequestOutputKind.FINAL_ONLY if args.final else RequestOutputKind.DELTA,
        logprobs=args.logprobs,
    )
    vocab = llm._engine.config.vocab_size
    ids = []
    for number in range(count):
        prompt = [(7919 * number + i) % (vocab - 8) + 4 for i in range(16)]
        ids.append(llm.add_request({"prompt_token_ids": prompt}, params))
    return ids


def quartile(figures: list[int]) -> float:
    """The first quartile."""
    return sorted(figures)[len(figures) // 4]


def clock_cost() -> int:
    """Nanoseconds of reading the clock."""
    reads = [time.thread_time_ns() for _ in range(2000)]
    return round(statistics.median(b - a for a, b in zip(reads, reads[1:], strict=False)))


def table(costs: list[Cost]) -> str:
    """One line for each measurement."""
    lines = [
        "| model, streams | whole | least | " + " | ".join(PARTS) + " | (wait) |",
        "|---|" + "---|" * (len(PARTS) + 3),
    ]
    for cost in costs:
        mode = "" if cost.is_async else ", sync"
        figures = [cost.whole, cost.least, *(cost.parts[part] for part in PARTS)]
        cells = " | ".join(f"{figure:.0f}" for figure in figures)
        name = f"{cost.model}, {cost.streams}{mode}"
        lines.append(f"| {name} | {cells} | {cost.wait:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Run the measurement; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["tiny", "smollm2-135m"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each kind")
    parser.add_argument("--sync", action="store_true", help="without asynchronous scheduling")
    parser.add_argument("--stop", action="store_true", help="requests have stop strings")
    parser.add_argument("--final", action="store_true", help="only final outputs, as in generate")
    parser.add_argument("--logprobs", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    costs = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            path = str(make_tiny(Path(folder))) if model == "tiny" else model
            costs += measure(model, path, args)
    if args.json:
        print(json.dumps([dataclasses.asdict(cost) for cost in costs], indent=2))
    else:
        print("CPU µs of the engine's thread per step\n\n" + table(costs))
    return 0


def make_tiny(folder: Path) -> Path:
    """A random checkpoint of two small layers."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.tiny_models import tiny_gguf

    return tiny_gguf(folder, "llama", "Q8_0")


if __name__ == "__main__":
    sys.exit(main())
