"""``--record``: writes down whatever moves an engine core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from twostep.contracts.clock import Clock
from twostep.contracts.observer import CoreMethod
from twostep.contracts.outputs import EngineCoreOutputs, ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.engine.recorded_grammars import GrammarNews
from twostep.engine.recording import (
    AnyEvent,
    Arrived,
    Called,
    Closed,
    Failed,
    Finished,
    GrammarSaid,
    Header,
    Launched,
    Planned,
    SamplingLaunched,
    Started,
    Updated,
    Waiting,
    encode_args,
    encode_events,
    encode_header,
    encode_plan,
)
from twostep.entrypoints.tracing.output_file import OutputFile


class StepRecorder:
    """A ``StepObserver`` that streams to a file and keeps nothing.

    It writes before each wait and after each step: a crash of the program leaves the plan that
    was running, and all results before it.
    """

    def __init__(self, file: OutputFile, header: Header, clock: Clock) -> None:
        self._file = file
        self._now = clock.monotonic
        self._events: list[AnyEvent] = []
        self._is_in_step = False
        file.write(encode_header(header))

    def called(self, method: CoreMethod, args: tuple[object, ...]) -> None:
        """See ``StepObserver.called``."""
        self._events.append(Called(self._now(), method, encode_args(args)))
        if not self._is_in_step:
            self._flush()

    def step_started(self) -> None:
        """See ``StepObserver.step_started``."""
        self._is_in_step = True
        self._events.append(Started(self._now()))

    def scheduled(self, plan: SchedulerOutput) -> None:
        """See ``StepObserver.scheduled``."""
        self._events.append(Planned(self._now(), msgspec.Raw(encode_plan(plan))))

    def launched(self, plan: SchedulerOutput) -> None:
        """See ``StepObserver.launched``."""
        self._events.append(Launched(self._now()))

    def sampling_launched(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None
    ) -> None:
        """See ``StepObserver.sampling_launched``."""
        structured = None if grammar_output is None else grammar_output.request_ids
        self._events.append(SamplingLaunched(self._now(), structured))

    def grammar_said(self, number: int, news: GrammarNews, detail: int | str | None = None) -> None:
        """See ``GrammarListener``."""
        self._events.append(GrammarSaid(self._now(), number, news, detail))

    def waiting(self, plan: SchedulerOutput) -> None:
        """See ``StepObserver.waiting``."""
        self._events.append(Waiting(self._now(), plan.step_id))
        self._flush()

    def result_arrived(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """See ``StepObserver.result_arrived``."""
        self._events.append(Arrived(self._now(), plan.step_id, output))

    def step_failed(self, plans: Sequence[SchedulerOutput], reason: str, is_fault: bool) -> None:
        """See ``StepObserver.step_failed``."""
        self._events.append(Failed(self._now(), plans[0].step_id, reason, is_fault))

    def updated(self, plan: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """See ``StepObserver.updated``."""
        self._events.append(Updated(self._now(), plan.step_id))

    def step_finished(self, executed: bool) -> None:
        """See ``StepObserver.step_finished``."""
        self._events.append(Finished(self._now(), executed))
        self._is_in_step = False
        self._flush()

    def close(self) -> None:
        """Mark the end; without the mark the program was killed."""
        self._events.append(Closed(self._now()))
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        self._file.write(encode_events(self._events))
        self._events.clear()
