"""Looks at the engine core at every stop and writes down what it sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from twostep.contracts.observer import CoreMethod, StepObserver
from twostep.contracts.outputs import EngineCoreOutputs, ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.engine.core import EngineCore
from twostep.engine.fan_out import together
from twostep.runner.graphs import BatchDescriptor
from twostep.runner.input_batch import InputBatch
from twostep.scheduler.request import Request
from twostep.sim.executor import SimStep


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """A request's counters at one moment."""

    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    is_prefill_chunk: bool
    num_blocks: int

    @property
    def need(self) -> int:
        """Tokens that are known, or on their way, and not computed."""
        return self.num_tokens + self.num_output_placeholders - self.num_computed_tokens


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The core at one moment."""

    time: float
    """Seconds of the core's clock, which may be a virtual one."""
    entered: float
    left: float
    """Seconds of this machine's clock when the looking began and ended."""
    queue: dict[int, dict[str, int]]
    """Steps in flight, the oldest first: the tokens of each request, by step id."""
    running: list[str]
    waiting: list[str]
    requests: dict[str, Counters]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner made of a plan."""

    batch: InputBatch
    logits_indices: list[int]
    """Flat indices of the tokens that get logits."""
    graph: BatchDescriptor
    step: SimStep | None = None
    """What only a simulated device can tell."""


class Call:
    """One call of the step function. What is not reached yet is not there yet."""

    plan: SchedulerOutput
    scheduled: View
    launched: View
    sampling_launched: View
    launch: Launch
    grammar_output: GrammarOutput | None
    waiting: View
    future: Any
    """What the core waited for."""
    waited_for: SchedulerOutput
    result: ModelRunnerOutput
    arrived: View
    updated: View
    outputs: Mapping[int, EngineCoreOutputs]
    finished: View
    executed: bool

    def __init__(self, started: View) -> None:
        self.started = started


class TourObserver:
    """A ``StepObserver`` that keeps a :class:`Call` for each call of the step function."""

    def __init__(
        self, clock: Callable[[], float], look_at_launch: Callable[[SchedulerOutput], Launch]
    ) -> None:
        """``clock`` is the core's; ``look_at_launch`` is asked when a step has been queued."""
        self.calls: list[Call] = []
        self.failure: str | None = None
        self._clock = clock
        self._look_at_launch = look_at_launch
        self._core: EngineCore | None = None
        self._others: StepObserver | None = None

    def watch(self, core: EngineCore) -> None:
        """Look at this core from now on, beside whoever does already."""
        self._core = core
        self._others = core.observer
        core.observer = together(self._others, self)

    def leave(self) -> None:
        """Look no more. Core and observer hold each other until then."""
        if self._core is not None:
            self._core.observer = self._others
            self._core = None

    def view(self) -> View:
        """The core as it is now."""
        entered = time.monotonic()
        assert self._core is not None, "watch comes first"
        scheduler = self._core.scheduler
        return View(
            time=self._clock(),
            entered=entered,
            queue={
                plan.step_id: plan.num_scheduled_tokens
                for _, plan in reversed(self._core.batch_queue)
            },
            running=[request.request_id for request in scheduler.running],
            waiting=[request.request_id for request in scheduler.waiting],
            requests={
                request_id: self._counters(request)
                for request_id, request in scheduler.requests.items()
            },
            left=time.monotonic(),
        )

    def _counters(self, request: Request) -> Counters:
        assert self._core is not None
        holds_blocks = request in self._core.scheduler.running
        kv = self._core.scheduler.kv_cache_manager
        return Counters(
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=request.num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_output_placeholders=request.num_output_placeholders,
            is_prefill_chunk=request.is_prefill_chunk,
            num_blocks=len(kv.get_block_ids(request.request_id)) if holds_blocks else 0,
        )

    # ---------------------------------------------------------------- StepObserver

    def called(self, method: CoreMethod, args: tuple[object, ...]) -> None:
        """Requests come and go outside of calls: nothing to note."""

    def step_started(self) -> None:
        """Stop 1."""
        self.calls.append(Call(started=self.view()))

    def scheduled(self, plan: SchedulerOutput) -> None:
        """Stops 2 and 3."""
        self.calls[-1].plan = plan
        self.calls[-1].scheduled = self.view()

    def launched(self, plan: SchedulerOutput) -> None:
        """Stops 4 to 7."""
        self.calls[-1].launched = self.view()

    def sampling_launched(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None
    ) -> None:
        """Stops 8 and 9."""
        self.calls[-1].grammar_output = grammar_output
        self.calls[-1].sampling_launched = self.view()
        self.calls[-1].launch = self._look_at_launch(plan)

    def waiting(self, plan: SchedulerOutput) -> None:
        """Stop 10 begins."""
        assert self._core is not None
        call = self.calls[-1]
        call.future, call.waited_for = self._core.batch_queue[-1]
        call.waiting = self.view()

    def result_arrived(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Stop 10 ends."""
        self.calls[-1].result = output
        self.calls[-1].arrived = self.view()

    def step_failed(self, plans: Sequence[SchedulerOutput], reason: str, is_fault: bool) -> None:
        """Whoever drives the core looks at ``failure``."""
        self.failure = f"step {plans[0].step_id} failed: {reason}"

    def updated(self, plan: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Stop 11."""
        self.calls[-1].outputs = outputs
        self.calls[-1].updated = self.view()

    def step_finished(self, executed: bool) -> None:
        """Stop 12."""
        self.calls[-1].executed = executed
        self.calls[-1].finished = self.view()
