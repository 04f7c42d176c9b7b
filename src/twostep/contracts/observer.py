"""Somebody who watches the engine core: a trace, a recording, the tour.

The core calls these methods in the order of the tour's stops, in its own thread. An observer reads
what it is given and what the core holds at that moment; it changes nothing and must not raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from twostep.contracts.outputs import EngineCoreOutputs, ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput

CoreMethod = Literal["add_request", "abort_requests", "reset_prefix_cache", "pause", "resume"]
"""What the outside may ask of a core; together with the results of steps, all that moves it."""


class StepObserver(Protocol):
    """Told of every call from outside and of every stop of a step."""

    def called(self, method: CoreMethod, args: tuple[object, ...]) -> None:
        """The core took a call from outside; a call that it refused by an exception is not told."""
        ...

    def step_started(self) -> None:
        """Stop 1: the loop calls the step function."""
        ...

    def scheduled(self, plan: SchedulerOutput) -> None:
        """Stops 2 and 3: the plan is made, counters are advanced."""
        ...

    def launched(self, plan: SchedulerOutput) -> None:
        """Stops 4 to 7: the executor has queued the forward pass."""
        ...

    def sampling_launched(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None
    ) -> None:
        """Stops 8 and 9: the executor has queued sampling."""
        ...

    def waiting(self, plan: SchedulerOutput) -> None:
        """Stop 10 begins: the core will wait for this step, the oldest in flight."""
        ...

    def result_arrived(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Stop 10 ends: the step's result is here."""
        ...

    def step_failed(self, plans: Sequence[SchedulerOutput], reason: str, is_fault: bool) -> None:
        """The first of these plans failed, the later ones are void. Instead of a result.

        ``is_fault`` is False for an interrupt (nobody is to blame).
        """
        ...

    def updated(self, plan: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Stop 11: the scheduler took the result (or the failure); the news by client."""
        ...

    def step_finished(self, executed: bool) -> None:
        """Stop 12: the step function returns its news; whether tokens were planned."""
        ...
