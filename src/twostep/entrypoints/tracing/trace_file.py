"""Spans as a Chrome/Perfetto trace, and back.

The array form of the trace event format: a file that was cut off still loads. Times are in
microseconds, from the first span on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twostep.contracts.errors import TwostepError
from twostep.contracts.outputs import SchedulerStats
from twostep.engine.timeline import LANES, Lane, PlanCounts, StepSpan
from twostep.entrypoints.tracing.output_file import OutputFile

PROCESS = 1
THREADS = {lane: number for number, lane in enumerate(LANES, start=1)}
BUFFERED_EVENTS = 512

_PLAN = (
    '"step":%d,"requests":%d,"tokens":%d,"new":%d,"cached":%d,"blocks":%d,"finished":%d,'
    '"preempted":%d'
)
_STATS = ',"running":%d,"waiting":%d,"free_blocks":%d'
_SPAN = '{"name":"%s %d","ph":"X","ts":%.3f,"dur":%.3f,"pid":1,"tid":%d,"cat":"%s","args":{%s}}'
_ARROW = '{"name":"step","ph":"%s","ts":%.3f,"pid":1,"tid":%d,"cat":"step","id":%d}'
_ARROW_END = '{"name":"step","ph":"f","bp":"e","ts":%.3f,"pid":1,"tid":%d,"cat":"step","id":%d}'
_COUNTER = '{"name":"%s","ph":"C","ts":%.3f,"pid":1,"args":{"value":%.6g}}'


class TraceFile:
    """Writes spans, arrows from each launch over the device to the update, and counters.

    Everything but names and reasons is a number, so events are filled into templates: an encoder
    would take several times as long, on the thread that plans.
    """

    def __init__(self, file: OutputFile) -> None:
        self._file = file
        self._events: list[str] = []
        self._separator = "[\n"
        self._origin: float | None = None
        self._usable_blocks = 0
        self._arrows: set[int] = set()
        """Steps whose arrow has not reached the device."""
        self._args: dict[int, str] = {}
        """Of the last plans, by step id."""
        self._counters: dict[str, float] = {}
        """The last values."""

    def begin(self, *, usable_blocks: int, version: str) -> None:
        """Name process and lanes. ``usable_blocks`` is the size of the KV cache's pool."""
        self._usable_blocks = usable_blocks
        self._add_name("process_name", {"name": "engine core"})
        self._add_name("process_labels", {"labels": f"twostep {version}"})
        for lane, thread in THREADS.items():
            self._add_name("thread_name", {"name": lane}, thread)
            self._add_name("thread_sort_index", {"sort_index": thread}, thread)

    def add(self, span: StepSpan) -> None:
        """Write a span."""
        origin = self._origin
        if origin is None:
            origin = self._origin = span.start
        # Whole nanoseconds: by rounding, two spans of a lane must not overlap.
        start_ns = int((span.start - origin) * 1e9)
        end_ns = int((span.end - origin) * 1e9)
        start = start_ns / 1000
        plan, lane = span.plan, span.lane
        step, thread = plan.step, THREADS[lane]
        name, args = span.name, self._plan_args(plan)
        if span.failure is not None:
            name = "failed"
            args += f',"failure":{json.dumps(span.failure)}'
        if span.graph is not None:
            args += f',"graph":"{span.graph}"'
        if span.stats is not None:
            args += self._stats_args(span.stats)
        add = self._events.append
        add(_SPAN % (name, step, start, (end_ns - start_ns) / 1000, thread, span.name, args))
        if lane == "launch":
            self._arrows.add(step)
            add(_ARROW % ("s", start, thread, step))
        elif lane == "device" and step in self._arrows:
            self._arrows.discard(step)
            add(_ARROW % ("t", start, thread, step))
        elif lane == "update":
            self._arrows.discard(step)
            add(_ARROW_END % (start, thread, step))
            if span.stats is not None:
                self._count("running requests", start, span.stats.num_running_reqs)
                self._count("waiting requests", start, span.stats.num_waiting_reqs)
                self._count("KV cache use, %", start, 100 * span.stats.kv_cache_usage)
        elif lane == "planning":
            self._count("tokens of a step", start, plan.tokens)
        if len(self._events) >= BUFFERED_EVENTS:
            self._flush()

    def close(self) -> None:
        """Write the rest and make it valid JSON. Safe to call twice."""
        self._flush()
        self._file.write(b"\n]\n")
        self._file.close()

    def _add_name(self, name: str, args: dict[str, object], thread: int | None = None) -> None:
        event: dict[str, object] = {"name": name, "ph": "M", "pid": PROCESS, "args": args}
        if thread is not None:
            event["tid"] = thread
        self._events.append(json.dumps(event))

    def _plan_args(self, plan: PlanCounts) -> str:
        """The same for all spans of a step, and most are of the one or two in flight."""
        args = self._args.get(plan.step)
        if args is None:
            if len(self._args) >= 4:
                self._args.clear()
            args = self._args[plan.step] = _PLAN % (
                plan.step,
                plan.requests,
                plan.tokens,
                plan.new,
                plan.cached,
                plan.blocks,
                plan.finished,
                plan.preempted,
            )
        return args

    def _stats_args(self, stats: SchedulerStats) -> str:
        free = round((1 - stats.kv_cache_usage) * self._usable_blocks)
        return _STATS % (stats.num_running_reqs, stats.num_waiting_reqs, free)

    def _count(self, name: str, time: float, value: float) -> None:
        """A counter keeps its value until it is told another one."""
        if self._counters.get(name) != value:
            self._counters[name] = value
            self._events.append(_COUNTER % (name, time, value))

    def _flush(self) -> None:
        """Whole events only, so that a killed program leaves no half of one."""
        if self._events:
            self._file.write((self._separator + ",\n".join(self._events)).encode())
            self._separator = ",\n"
            self._events.clear()


def read_spans(path: str | Path) -> list[StepSpan]:
    """The spans of a trace that ``TraceFile`` wrote, closed or not.

    Raises:
        TwostepError: The file cannot be read, or is no such trace.
    """
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip()
        events = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
        lanes: dict[int, Lane] = {thread: lane for lane, thread in THREADS.items()}
        return [_span(event, lanes[event["tid"]]) for event in events if event["ph"] == "X"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TwostepError(f"{path} is not a trace of twostep: {error!r}") from None


def _span(event: dict[str, Any], lane: Lane) -> StepSpan:
    args = event["args"]
    return StepSpan(
        lane=lane,
        name=event["cat"],
        start=event["ts"] / 1e6,
        end=(event["ts"] + event["dur"]) / 1e6,
        plan=PlanCounts(**{name: args[name] for name in PlanCounts.__struct_fields__}),
        graph=args.get("graph"),
        failure=args.get("failure"),
    )
