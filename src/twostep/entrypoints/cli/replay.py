"""``twostep replay FILE``: run a recording again and compare its plans, byte for byte."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from twostep import __version__
from twostep.contracts.errors import TwostepError, UsageError
from twostep.contracts.plan import SchedulerOutput
from twostep.engine.device_idle import device_idle_share, host_overlap
from twostep.engine.recording import Header, Recording
from twostep.engine.replay import Difference, Replay, ReplayClock
from twostep.engine.timeline import PlanCounts, StepSpan, Timeline
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console
from twostep.entrypoints.tracing.output_file import OutputFile
from twostep.entrypoints.tracing.trace_file import TraceFile
from twostep.entrypoints.tracing.watch import SPANS_FOR_FIGURES, overlap_figures

DESCRIPTION = """\
Run a recording (made with --record) again on the engine core of this version:
the recorded requests and results in, the same plans out. Needs no model. The
exit code is 1 if a plan differs.

  twostep complete smollm2-135m "Once upon a" --record run.rec
  twostep replay run.rec
  twostep replay run.rec --trace run.json
"""


def run(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = cli_args.Parser("twostep replay", "FILE", DESCRIPTION)
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--trace", metavar="OUT", help="write the recorded timeline as a trace")
    parser.add_argument(
        "--until", type=cli_args.size, metavar="STEP", help="stop after this step was planned"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="at a difference show both plans"
    )
    args = parser.parse(argv)
    path = Path(args.file).expanduser()
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    with file:
        recording = Recording(file, str(path))
        clock = ReplayClock()
        with open_trace(args.trace, recording.header) as trace_file:
            steps = Steps(trace_file, show=not args.json)
            replay = Replay(recording, clock, Timeline(clock, steps.add))
            with quiet_engine():
                difference = replay.run(args.until)
    was_killed = not recording.is_complete and args.until is None and difference is None
    if was_killed:
        end = "before its first step" if replay.step_id < 0 else f"after step {replay.step_id}"
        print(f"{path} ends {end}: the program was killed", file=sys.stderr)
    if args.json:
        console.print_json(
            {
                "file": str(path),
                "recorded_by": recording.header.version,
                "replayed_by": __version__,
                "was_killed": was_killed,
                "plans": steps.num_plans,
                "requests": replay.num_requests,
                "tokens": steps.num_tokens,
                "equal": difference is None,
                "difference": None
                if difference is None
                else difference_document(difference, with_plans=args.verbose),
                **steps.overlap(),
            }
        )
        return 0 if difference is None else 1
    if difference is not None:
        if args.verbose:
            print_plans(difference)
        raise TwostepError(f"{path} (recorded by twostep {recording.header.version}): {difference}")
    print(
        f"all as recorded: plans {steps.num_plans:,}, requests {replay.num_requests:,}, "
        f"tokens {steps.num_tokens:,}"
    )
    if figures := overlap_figures(steps.spans):
        print(figures)
    return 0


@contextlib.contextmanager
def quiet_engine() -> Iterator[None]:
    """A step that failed when it was recorded fails again, with a traceback nobody needs here."""
    logger = logging.getLogger("twostep.engine")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def difference_document(difference: Difference, *, with_plans: bool) -> dict[str, Any]:
    """The difference for JSON."""
    found: dict[str, Any] = msgspec.to_builtins(difference)
    if not with_plans:
        del found["recorded_plan"], found["replayed_plan"]
    return found


def print_plans(difference: Difference) -> None:
    """Both plans in full, one field a line, ``-`` as recorded and ``+`` as planned now."""
    recorded, replayed = difference.recorded_plan, difference.replayed_plan
    if recorded is None or replayed is None:
        return
    for name in SchedulerOutput.__struct_fields__:
        then, now = getattr(recorded, name), getattr(replayed, name)
        if then == now and repr(then) == repr(now):
            print(f"  {name}: {then!r}")
        else:
            print(f"- {name}: {then!r}\n+ {name}: {now!r}")


class Steps:
    """Takes the spans of the recorded run: counts plans and prints them, writes the trace."""

    def __init__(self, trace_file: TraceFile | None, *, show: bool) -> None:
        self.num_plans = 0
        self.num_tokens = 0
        self.spans: deque[StepSpan] = deque(maxlen=SPANS_FOR_FIGURES)
        self._trace_file = trace_file
        self._show = show

    def add(self, span: StepSpan) -> None:
        """A stop of a step, in the order of their ends."""
        self.spans.append(span)
        if self._trace_file is not None:
            self._trace_file.add(span)
        if span.lane == "planning":
            if self._show:
                if self.num_plans == 0:
                    print(console.dim(line("step", "requests", "tokens", "blocks"), sys.stdout))
                print(plan_line(span.plan))
            self.num_plans += 1
            self.num_tokens += span.plan.tokens

    def overlap(self) -> dict[str, float | None]:
        """How well host and device overlapped, for JSON; None if nobody timed the device."""
        is_timed = any(span.lane == "device" for span in self.spans)
        return {
            "device_idle_share": device_idle_share(self.spans) if is_timed else None,
            "host_overlap": host_overlap(self.spans) if is_timed else None,
        }


@contextlib.contextmanager
def open_trace(trace: str | None, header: Header) -> Iterator[TraceFile | None]:
    """The trace file, if one is asked for."""
    if trace is None:
        yield None
        return
    output = OutputFile(trace, "--trace")
    trace_file = TraceFile(output)
    trace_file.begin(usable_blocks=header.cache_config.num_blocks - 1, version=header.version)
    try:
        yield trace_file
    finally:
        trace_file.close()
    if output.failure is not None:
        raise TwostepError(f"--trace {output.path} is incomplete: {output.failure}")


def line(*cells: str, remark: str = "") -> str:
    """Right-aligned columns and a remark."""
    return ("".join(f"{cell:>10}" for cell in cells) + "   " + remark).rstrip()


def plan_line(plan: PlanCounts) -> str:
    """One step, for people."""
    remarks = ((plan.new, "new"), (plan.finished, "finished"), (plan.preempted, "preempted"))
    return line(
        f"{plan.step}",
        f"{plan.requests}",
        f"{plan.tokens}",
        f"+{plan.blocks}" if plan.blocks else "",
        remark=", ".join(f"{count} {what}" for count, what in remarks if count),
    )
