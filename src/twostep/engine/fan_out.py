"""Several observers of one engine core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostep.contracts.observer import CoreMethod, StepObserver
from twostep.contracts.outputs import EngineCoreOutputs, ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput


def together(*observers: StepObserver | None) -> StepObserver | None:
    """One observer that stands for all that are there; None if nobody is."""
    present = [observer for observer in observers if observer is not None]
    if len(present) < 2:
        return present[0] if present else None
    return FanOut(present)


class FanOut:
    """A ``StepObserver`` that tells others, in order."""

    def __init__(self, observers: Sequence[StepObserver]) -> None:
        self._observers = tuple(observers)

    def called(self, method: CoreMethod, args: tuple[object, ...]) -> None:
        """See ``StepObserver.called``."""
        for observer in self._observers:
            observer.called(method, args)

    def step_started(self) -> None:
        """See ``StepObserver.step_started``."""
        for observer in self._observers:
            observer.step_started()

    def scheduled(self, plan: SchedulerOutput) -> None:
        """See ``StepObserver.scheduled``."""
        for observer in self._observers:
            observer.scheduled(plan)

    def launched(self, plan: SchedulerOutput) -> None:
        """See ``StepObserver.launched``."""
        for observer in self._observers:
            observer.launched(plan)

    def sampling_launched(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None
    ) -> None:
        """See ``StepObserver.sampling_launched``."""
        for observer in self._observers:
            observer.sampling_launched(plan, grammar_output)

    def waiting(self, plan: SchedulerOutput) -> None:
        """See ``StepObserver.waiting``."""
        for observer in self._observers:
            observer.waiting(plan)

    def result_arrived(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """See ``StepObserver.result_arrived``."""
        for observer in self._observers:
            observer.result_arrived(plan, output)

    def step_failed(self, plans: Sequence[SchedulerOutput], reason: str, is_fault: bool) -> None:
        """See ``StepObserver.step_failed``."""
        for observer in self._observers:
            observer.step_failed(plans, reason, is_fault)

    def updated(self, plan: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """See ``StepObserver.updated``."""
        for observer in self._observers:
            observer.updated(plan, outputs)

    def step_finished(self, executed: bool) -> None:
        """See ``StepObserver.step_finished``."""
        for observer in self._observers:
            observer.step_finished(executed)
