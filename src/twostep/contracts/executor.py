"""The seam between planning and compute: what the engine core asks of an executor."""

from __future__ import annotations

from typing import Protocol

from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput


class StepFuture(Protocol):
    """The result of a step that may still be running."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the device. The one wait of the whole program; raises what the step raised."""
        ...

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        ...


class Executor(Protocol):
    """Runs plans on a device, in order. Built by ``entrypoints`` and handed to the engine core."""

    max_concurrent_batches: int
    """How many plans may be in flight (2 with async scheduling on one device)."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture | None:
        """Queue the forward pass and return None without waiting; ``sample_tokens`` must follow.

        A plan of 0 tokens only carries finished and preempted ids: it is applied, a completed
        future with an empty output is returned, and no ``sample_tokens`` follows.
        Raises if the plan cannot be queued; nothing of it ran then.
        """
        ...

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Queue sampling for the forward pass just queued; the future gives the step's result."""
        ...

    def time_device(self, wanted: bool = True) -> None:
        """From now on results carry ``device_spans``, or (not ``wanted``) no longer do.

        An executor that cannot tell leaves them.
        """
        ...

    def reset_after_failure(self) -> None:
        """Forget a forward pass that was queued without sampling, after an exception."""
        ...

    def shutdown(self) -> None:
        """Wait for what runs, free everything. Safe to call twice."""
        ...
