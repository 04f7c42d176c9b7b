"""``--trace`` and ``--record``: the files that follow an engine core, from start to end."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.clock import Clock
from twostep.contracts.errors import UsageError
from twostep.contracts.executor import Executor
from twostep.contracts.grammar import GrammarCompiler
from twostep.contracts.observer import StepObserver
from twostep.engine.device_idle import device_idle_share, host_overlap
from twostep.engine.fan_out import together
from twostep.engine.timeline import StepSpan, Timeline
from twostep.entrypoints.tracing.output_file import OutputFile
from twostep.entrypoints.tracing.trace_file import TraceFile

if TYPE_CHECKING:  # a start without a recording does without these
    from twostep.entrypoints.tracing.step_recorder import StepRecorder

SPANS_FOR_FIGURES = 20_000
"""Some 2,000 steps: the figures at the end are of the last ones."""


class Watch:
    """Made before anything else is, told of the engine by ``begin``, closed after it.

    ::

        watch = Watch(args.trace, args.record)
        observer = watch.begin(executor, clock, scheduler_config, cache_config)
        core = EngineCore(..., executor=executor, clock=clock, observer=observer)
        ...
        watch.close()
        for line in watch.lines(): ...
    """

    def __init__(self, trace: str | Path | None, record: str | Path | None) -> None:
        """Create the files that are asked for; None for both costs nothing at all.

        Raises:
            UsageError: A file cannot be written, or both are the same.
        """
        if trace is not None and record is not None and Path(trace) == Path(record):
            raise UsageError(f"--trace and --record both name {trace}: give them two files")
        self._trace = None if trace is None else OutputFile(trace, "--trace")
        self._record = None if record is None else OutputFile(record, "--record")
        self._trace_file: TraceFile | None = None
        self._recorder: StepRecorder | None = None
        self._spans: deque[StepSpan] = deque(maxlen=SPANS_FOR_FIGURES)
        self._is_closed = False

    def begin(
        self,
        executor: Executor,
        clock: Clock,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        num_spec_tokens: int = 0,
    ) -> StepObserver | None:
        """What the core is to be built with; the arguments are the core's own."""
        from twostep import __version__

        observers: list[StepObserver] = []
        if self._trace is not None:
            self._trace_file = TraceFile(self._trace)
            self._trace_file.begin(usable_blocks=cache_config.num_blocks - 1, version=__version__)
            observers.append(Timeline(clock, self._add_span))
        if self._record is not None:
            from twostep.engine.recording import Header
            from twostep.entrypoints.tracing.step_recorder import StepRecorder

            header = Header(
                version=__version__,
                scheduler_config=scheduler_config,
                cache_config=cache_config,
                num_spec_tokens=num_spec_tokens,
                max_concurrent_batches=executor.max_concurrent_batches,
            )
            self._recorder = StepRecorder(self._record, header, clock)
            observers.append(self._recorder)
        if observers:
            executor.time_device()
        return together(*observers)

    def grammars(self, compiler: GrammarCompiler) -> GrammarCompiler:
        """The compiler that the core is to be built with, after ``begin``: what its grammars say
        is part of a recording."""
        if self._recorder is None:
            return compiler
        from twostep.engine.recorded_grammars import RecordedCompiler

        return RecordedCompiler(compiler, self._recorder)

    def close(self) -> None:
        """Write what is left. Safe to call twice, and without ``begin``."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._trace_file is not None:
            self._trace_file.close()
        elif self._trace is not None:
            self._trace.close()
        if self._recorder is not None:
            self._recorder.close()
        elif self._record is not None:
            self._record.close()

    def lines(self) -> list[str]:
        """Where the files lie and how to look at them, for people."""
        lines = []
        if self._trace is not None:
            lines.append(
                f"trace: {self._trace.path}{_failure(self._trace)}"
                " (open it in ui.perfetto.dev or chrome://tracing)"
            )
            if figures := overlap_figures(self._spans):
                lines.append(f"trace: {figures}")
        if self._record is not None:
            lines.append(
                f"recording: {self._record.path}{_failure(self._record)}"
                f" (twostep replay {self._record.path})"
            )
        return lines

    def _add_span(self, span: StepSpan) -> None:
        assert self._trace_file is not None
        self._spans.append(span)
        self._trace_file.add(span)


def overlap_figures(spans: deque[StepSpan] | list[StepSpan]) -> str:
    """How well host and device overlapped, in words; empty if the device told no times."""
    if not any(span.lane == "device" for span in spans):
        return ""
    idle = f"device idle {device_idle_share(spans):.1%} of the time with work"
    overlap = host_overlap(spans)
    return idle if overlap is None else f"{idle}; {overlap:.0%} of planning and launch overlapped"


def _failure(file: OutputFile) -> str:
    return "" if file.failure is None else f", INCOMPLETE: {file.failure}"
