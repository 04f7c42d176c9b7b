"""The engine as somebody sees it who looks at it now; costs nothing while nobody does.

A ``StepObserver`` that is put into the core when the first watcher comes and taken out when the
last one goes. It collects what happens and hands it over some ten times a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, islice
from typing import Literal

from twostep.contracts.clock import Clock
from twostep.contracts.live_view import (
    BlockMap,
    BlockState,
    LaneSpan,
    LiveUpdate,
    PlannedRequest,
    PlanView,
    RequestEvent,
)
from twostep.contracts.observer import CoreMethod
from twostep.contracts.outputs import EngineCoreOutputs, ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.engine.timeline import StepSpan, Timeline
from twostep.kv_cache.block_pool import NULL_BLOCK_ID
from twostep.scheduler.scheduler import Scheduler

UPDATE_SECONDS = 0.1
"""Between updates."""
MAP_SECONDS = 0.5
"""Between maps of the blocks: each looks at every block that is not free."""
MAX_PLANNED = 64
"""Requests of one plan that are told."""
MAX_WAITING = 64
MAX_CELLS = 4096
"""Of a map."""


class LiveView:
    """Watches one core and calls ``send`` with updates, on the core's thread."""

    def __init__(
        self, scheduler: Scheduler, clock: Clock, send: Callable[[LiveUpdate], bool]
    ) -> None:
        """``send`` must not wait; False says that it has thrown the update away."""
        self._scheduler = scheduler
        self._now = clock.monotonic
        self._send = send
        self._timeline = Timeline(clock, self._add_span)
        self._num_dropped = 0
        self._next_update = 0.0
        self._next_map = 0.0
        self._forget()

    def _forget(self) -> None:
        self._plans: list[PlanView] = []
        self._spans: list[LaneSpan] = []
        self._events: list[RequestEvent] = []
        self._queries = self._hits = self._preemptions = 0

    def _add_span(self, span: StepSpan) -> None:
        self._spans.append(LaneSpan(span.plan.step, span.lane, span.name, span.start, span.end))

    # -- what the core tells -----------------------------------------------------------------

    def called(self, method: CoreMethod, args: tuple[object, ...]) -> None:
        """Arrivals and aborts."""
        self._timeline.called(method, args)
        now = self._now()
        [first, *_] = args or (None,)
        if isinstance(first, EngineCoreRequest):
            size = len(first.prompt_token_ids)
            self._events.append(RequestEvent(now, first.request_id, "arrived", size))
        elif method == "abort_requests" and isinstance(first, list):
            self._events += [RequestEvent(now, each, "aborted", 0) for each in first]

    def step_started(self) -> None:
        """Stop 1."""
        self._timeline.step_started()

    def scheduled(self, plan: SchedulerOutput) -> None:
        """Stops 2 and 3."""
        self._timeline.scheduled(plan)
        if plan.num_scheduled_tokens or plan.preempted_req_ids:
            self._plans.append(self._view_of(plan))

    def launched(self, plan: SchedulerOutput) -> None:
        """Stops 4 to 7."""
        self._timeline.launched(plan)

    def sampling_launched(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None
    ) -> None:
        """Stops 8 and 9."""
        self._timeline.sampling_launched(plan, grammar_output)

    def waiting(self, plan: SchedulerOutput) -> None:
        """Stop 10 begins."""
        self._timeline.waiting(plan)

    def result_arrived(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Stop 10 ends."""
        self._timeline.result_arrived(plan, output)

    def step_failed(self, plans: Sequence[SchedulerOutput], reason: str, is_fault: bool) -> None:
        """Instead of a result."""
        self._timeline.step_failed(plans, reason, is_fault)

    def updated(self, plan: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Stop 11."""
        self._timeline.updated(plan, outputs)
        now = self._now()
        for news in outputs.values():
            stats = news.scheduler_stats
            if stats is not None:
                self._queries += stats.prefix_cache_queries
                self._hits += stats.prefix_cache_hits
                self._preemptions += stats.num_preemptions
            self._events += [
                RequestEvent(now, output.request_id, str(output.finish_reason), 0)
                for output in news.outputs
                if output.finish_reason is not None
            ]

    def step_finished(self, executed: bool) -> None:
        """Stop 12: hand over what there is, if it is time or nothing more will come."""
        self._timeline.step_finished(executed)
        now = self._now()
        if now >= self._next_update or not self._scheduler.has_requests():
            self.flush()

    # -- updates -----------------------------------------------------------------------------

    def show_all(self) -> None:
        """Send the whole picture now, for somebody who has just come."""
        self._next_map = 0.0
        self.flush()

    def flush(self) -> None:
        """Send what has happened since the last update, or only how things stand."""
        now = self._now()
        self._next_update = now + UPDATE_SECONDS
        scheduler = self._scheduler
        blocks = None
        if now >= self._next_map or not scheduler.running:
            self._next_map = now + MAP_SECONDS
            blocks = block_map(scheduler)
        first_waiting = islice(scheduler.waiting, MAX_WAITING)
        sent = self._send(
            LiveUpdate(
                time=now,
                token_budget=scheduler.config.largest_step,
                max_num_seqs=scheduler.config.max_num_seqs,
                plans=self._plans,
                spans=self._spans,
                events=self._events,
                running=[request.request_id for request in scheduler.running],
                waiting=[request.request_id for request in first_waiting],
                num_waiting=len(scheduler.waiting),
                kv_cache_usage=scheduler.kv_cache_manager.pool.usage,
                prefix_cache_queries=self._queries,
                prefix_cache_hits=self._hits,
                num_preemptions=self._preemptions,
                num_dropped=self._num_dropped,
                blocks=blocks,
            )
        )
        self._num_dropped = 0 if sent else self._num_dropped + 1
        self._forget()

    def _view_of(self, plan: SchedulerOutput) -> PlanView:
        planned: list[PlannedRequest] = []
        num_blocks = 0
        scheduled = plan.num_scheduled_tokens
        cached = plan.scheduled_cached_reqs
        for request_id, computed, outputs, new_blocks in zip(
            cached.req_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            cached.new_block_ids,
            strict=True,
        ):
            num_blocks += len(new_blocks or ())
            if len(planned) < MAX_PLANNED:
                # Its first output comes with the last chunk of its prompt.
                kind: Literal["prefill", "decode"] = "decode" if outputs else "prefill"
                planned.append(PlannedRequest(request_id, scheduled[request_id], computed, kind))
        for new in plan.scheduled_new_reqs:
            num_blocks += len(new.block_ids)
            if len(planned) < MAX_PLANNED:
                tokens = scheduled[new.request_id]
                planned.append(
                    PlannedRequest(new.request_id, tokens, new.num_computed_tokens, "new")
                )
        return PlanView(
            step_id=plan.step_id,
            time=self._now(),
            num_tokens=plan.total_num_scheduled_tokens,
            num_requests=len(scheduled),
            planned=planned,
            num_new_blocks=num_blocks,
            preempted=sorted(plan.preempted_req_ids),
        )


def block_map(scheduler: Scheduler) -> BlockMap:
    """How every block is used now."""
    kv = scheduler.kv_cache_manager
    pool = kv.pool
    states: list[BlockState] = [0] * pool.num_blocks
    owner_of = [-1] * pool.num_blocks
    for block_id in pool.reusable.in_order():
        states[block_id] = 1
    owners = [request.request_id for request in scheduler.running]
    for owner, request_id in enumerate(owners):
        for block_id in kv.get_block_ids(request_id):
            states[block_id] = 2
            owner_of[block_id] = owner
    for block_id in pool.extra_refs:
        states[block_id] = 3
    states[NULL_BLOCK_ID], owner_of[NULL_BLOCK_ID] = 0, -1
    cell = -(-pool.num_blocks // MAX_CELLS)
    cells = zip(states[::cell], owner_of[::cell], strict=True)
    runs = [(state, owner, len(list(same))) for (state, owner), same in groupby(cells)]
    return BlockMap(num_blocks=pool.num_blocks, cell=cell, runs=runs, owners=owners)
