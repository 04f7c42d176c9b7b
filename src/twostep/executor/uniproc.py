"""Runs the model in the engine core's own process (stop 4)."""

from __future__ import annotations

from twostep.contracts.executor import StepFuture
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.runner.model_runner import ModelRunner


class UniprocExecutor:
    """An ``Executor`` of one worker, called directly: no queue, no copy."""

    def __init__(self, runner: ModelRunner, *, max_concurrent_batches: int) -> None:
        self.max_concurrent_batches = max_concurrent_batches
        self.runner = runner

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture | None:
        """See ``Executor.execute_model``."""
        return self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """See ``Executor.sample_tokens``."""
        return self.runner.sample_tokens(grammar_output)

    def time_device(self, wanted: bool = True) -> None:
        """See ``Executor.time_device``."""
        self.runner.time_device(wanted)

    def reset_after_failure(self) -> None:
        """See ``Executor.reset_after_failure``."""
        self.runner.reset_after_failure()

    def shutdown(self) -> None:
        """See ``Executor.shutdown``."""
        self.runner.shutdown()
