"""When each stop of each step happened: an observer that turns the core's stops into spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from twostep.contracts.clock import Clock
from twostep.contracts.observer import CoreMethod
from twostep.contracts.outputs import EngineCoreOutputs, ModelRunnerOutput, SchedulerStats
from twostep.contracts.plan import GrammarOutput, SchedulerOutput

Lane = Literal["planning", "launch", "sampling", "wait", "update", "output", "device"]
LANES: tuple[Lane, ...] = ("planning", "launch", "sampling", "wait", "update", "output", "device")
"""In the order of the tour. All but the last belong to the core's thread."""


class PlanCounts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A plan as numbers."""

    step: int
    requests: int
    tokens: int
    new: int
    """Requests that the runner gets a row for."""
    cached: int
    """Requests that it knows already."""
    blocks: int
    """KV blocks handed out, cache hits included."""
    finished: int
    preempted: int


class StepSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One stop of one step, or one launch of it on the device."""

    lane: Lane
    name: str
    """The lane; on the device ``forward``, ``logits`` or ``sample``."""
    start: float
    """Seconds, the core's clock."""
    end: float
    plan: PlanCounts
    graph: str | None = None
    """In the lane ``device``: the graph mode of the step's forward pass, if it is known."""
    failure: str | None = None
    """In the lane ``wait``: why the step failed."""
    stats: SchedulerStats | None = None
    """In the lane ``update``: the scheduler afterwards."""


def count_plan(plan: SchedulerOutput) -> PlanCounts:
    """The numbers of a plan."""
    cached = plan.scheduled_cached_reqs
    num_blocks = sum(len(new.block_ids) for new in plan.scheduled_new_reqs)
    num_blocks += sum(len(ids) for ids in cached.new_block_ids if ids)
    return PlanCounts(
        step=plan.step_id,
        requests=len(plan.num_scheduled_tokens),
        tokens=plan.total_num_scheduled_tokens,
        new=len(plan.scheduled_new_reqs),
        cached=len(cached.req_ids),
        blocks=num_blocks,
        finished=len(plan.finished_req_ids),
        preempted=len(plan.preempted_req_ids),
    )


class Timeline:
    """A ``StepObserver`` that hands each span to ``sink``, as soon as it has ended.

    ``planning`` starts with the call of the step function, so that the spans of the core's thread
    follow each other without a hole while there is work: ``output`` lasts until the next call (the
    caller takes the news: detokenizes, prints), or ends at once if no request is left. Steps that
    were in flight when it began to watch have no spans.
    """

    def __init__(self, clock: Clock, sink: Callable[[StepSpan], None]) -> None:
        self._now = clock.monotonic
        self._sink = sink
        self._counts: dict[int, PlanCounts] = {}
        """Of the plans in flight, by step id."""
        self._since = 0.0
        """When the current stop began."""
        self._handing_out: PlanCounts | None = None
        self._unfinished = 0

    def called(self, method: CoreMethod, args: tuple[object, ...]) -> None:
        """After a pause, or an abort of the last request, the caller is not busy but gone."""
        if method == "abort_requests":
            [ids] = args
            assert isinstance(ids, list)
            self._unfinished -= len(ids)
        elif method == "add_request":
            self._unfinished += 1
        if method == "pause" or self._unfinished <= 0:
            self._end_output(self._now())

    def step_started(self) -> None:
        """Stop 1."""
        now = self._now()
        self._end_output(now)
        self._since = now

    def scheduled(self, plan: SchedulerOutput) -> None:
        """Stops 2 and 3."""
        counts = self._counts[plan.step_id] = count_plan(plan)
        self._end("planning", counts)
        if not (counts.tokens or counts.finished or counts.preempted):
            del self._counts[plan.step_id]  # nothing to launch, nothing will come back

    def launched(self, plan: SchedulerOutput) -> None:
        """Stops 4 to 7."""
        self._end("launch", self._counts[plan.step_id])

    def sampling_launched(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None
    ) -> None:
        """Stops 8 and 9."""
        counts = self._counts.get(plan.step_id)
        if counts is not None:  # else it was planned before anybody watched: it waited for a mask
            self._end("sampling", counts)

    def waiting(self, plan: SchedulerOutput) -> None:
        """Stop 10 begins."""
        self._since = self._now()

    def result_arrived(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Stop 10 ends."""
        counts = self._counts.get(plan.step_id)
        if counts is None:
            return
        graph = output.graph_mode
        for name, start, end in output.device_spans or ():
            self._sink(
                StepSpan(lane="device", name=name, start=start, end=end, plan=counts, graph=graph)
            )
        self._end("wait", counts)

    def step_failed(self, plans: Sequence[SchedulerOutput], reason: str, is_fault: bool) -> None:
        """Instead of a result. What was planned on top never gets one."""
        counts = self._counts.get(plans[0].step_id)
        if counts is not None:
            self._end("wait", counts, failure=reason)
        for plan in plans[1:]:
            self._counts.pop(plan.step_id, None)

    def updated(self, plan: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Stop 11."""
        stats = next((o.scheduler_stats for o in outputs.values() if o.scheduler_stats), None)
        counts = self._counts.pop(plan.step_id, None)
        if counts is not None:
            self._end("update", counts, stats=stats)
            self._handing_out = counts
        if stats is not None:
            self._unfinished = stats.num_running_reqs + stats.num_waiting_reqs

    def step_finished(self, executed: bool) -> None:
        """Stop 12."""
        if self._unfinished <= 0:
            self._end_output(self._now())

    def _end(
        self,
        lane: Lane,
        counts: PlanCounts,
        failure: str | None = None,
        stats: SchedulerStats | None = None,
    ) -> None:
        """The current stop ends here, and the next one begins."""
        now = self._now()
        self._sink(
            StepSpan(
                lane=lane,
                name=lane,
                start=self._since,
                end=now,
                plan=counts,
                failure=failure,
                stats=stats,
            )
        )
        self._since = now

    def _end_output(self, now: float) -> None:
        if self._handing_out is not None:
            counts, self._handing_out = self._handing_out, None
            self._sink(
                StepSpan(lane="output", name="output", start=self._since, end=now, plan=counts)
            )
