"""Rules of a plan, checked when it is made: budgets, order, victims, and no idle budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twostep.contracts.observer import CoreMethod, StepObserver
from twostep.contracts.plan import SchedulerOutput
from twostep.engine.core import EngineCore
from twostep.scheduler.request import Request
from twostep.scheduler.scheduler import Scheduler
from twostep.sim.case import CaseConfig
from twostep.sim.clock import VirtualClock
from twostep.sim.ghost import GhostExecutor
from twostep.sim.streams import Stream
from twostep.sim.violation import Violation


class PlanRules(StepObserver):
    """Watches a core. Keeps its own list of who runs, from plans and ends alone."""

    def __init__(
        self,
        config: CaseConfig,
        streams: Mapping[str, Stream],
        ghost: GhostExecutor,
        clock: VirtualClock,
    ) -> None:
        self.clock = clock
        self.config = config
        self.streams = streams
        self.ghost = ghost
        self.core: EngineCore | None = None
        self.never_started: dict[str, None] = {}
        """Admitted, never in a plan; in the order of admission."""
        self.running: dict[str, None] = {}
        """In the order in which they last started."""
        self.last_step_id = -1
        self.num_tokens = 0
        self.num_aborted = 0
        self.pause_mode: str | None = None
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.num_lookup_tokens = 0
        self.num_budget_exhausted = 0
        self.num_twice_preempted = 0
        self.num_refused_failures = 0

    def ended(self, request_id: str) -> None:
        """A request is over, for whatever reason."""
        self.never_started.pop(request_id, None)
        self.running.pop(request_id, None)

    # ---------------------------------------------------------------- the observer

    def scheduled(self, plan: SchedulerOutput) -> None:
        """Check the plan, then take note of it."""
        assert self.core is not None
        scheduler = self.core.scheduler
        self._check_numbers(plan, scheduler)
        if self.pause_mode is not None:
            self._check_pause(plan)
        if plan.preempted_req_ids:
            self._check_victims(plan)
        for request_id in plan.preempted_req_ids:
            self._note_preemption(request_id)
        if plan.scheduled_new_reqs:
            self._check_order(plan, scheduler)
        for new in plan.scheduled_new_reqs:
            self._note_start(plan, new.request_id, new.num_computed_tokens)
        if (
            plan.total_num_scheduled_tokens < self.config.budget
            and not scheduler.suspects
            and self.pause_mode is None
        ):
            self._check_work_conserving(plan, scheduler)
        step_id = plan.step_id
        streams = self.streams
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            stream = streams[request_id]
            stream.last_step = step_id
            stream.num_planned += num_tokens
        if not self.config.num_spec_tokens:
            cached = plan.scheduled_cached_reqs
            for request_id, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
                if outputs >= streams[request_id].limit:
                    raise Violation("I8", f"{request_id} is planned past its certain end")
        self.num_tokens += plan.total_num_scheduled_tokens

    def called(self, method: CoreMethod, args: tuple[Any, ...]) -> None:
        """Aborts are seen here when they happen, those from another thread included."""
        if method == "abort_requests":
            for request_id in args[0]:
                stream = self.streams.get(request_id)
                if stream is not None and stream.is_live:
                    stream.is_aborted = True
                    self.num_aborted += 1
                    self.ended(request_id)
        elif method == "pause":
            self.pause_mode = args[0]
        elif method == "resume":
            self.pause_mode = None

    def step_started(self) -> None:
        """Not needed."""

    def launched(self, plan: SchedulerOutput) -> None:
        """Not needed."""

    def sampling_launched(self, plan: SchedulerOutput, grammar_output: Any) -> None:
        """Not needed."""

    def waiting(self, plan: SchedulerOutput) -> None:
        """Not needed."""

    def result_arrived(self, plan: SchedulerOutput, output: Any) -> None:
        """Not needed."""

    def step_failed(self, plans: Sequence[SchedulerOutput], reason: str, is_fault: bool) -> None:
        """Count failures that meet fenced blocks."""
        assert self.core is not None
        if self.core.scheduler.kv_cache_manager._parked:
            self.num_refused_failures += 1

    def updated(self, plan: SchedulerOutput, outputs: Any) -> None:
        """Not needed."""

    def step_finished(self, executed: bool) -> None:
        """Not needed."""

    # ---------------------------------------------------------------- I8

    def _check_numbers(self, plan: SchedulerOutput, scheduler: Scheduler) -> None:
        config = self.config
        scheduled = plan.num_scheduled_tokens
        total = sum(scheduled.values())
        if plan.step_id != self.last_step_id + 1:
            raise Violation("contract", f"step {plan.step_id} follows {self.last_step_id}")
        self.last_step_id = plan.step_id
        if total != plan.total_num_scheduled_tokens:
            raise Violation("contract", f"the plan's total is {plan.total_num_scheduled_tokens}")
        budget = config.budget
        if scheduler._burst_tokens > 0:  # the step of a crowd
            budget = max(budget, config.crowd_step)
        elif scheduler.waiting or plan.scheduled_new_reqs:
            budget = max(budget, config.crowd_step // 2)
        if total > budget:
            raise Violation("I8", f"{total} tokens are planned, the budget is {budget}")
        cap = config.long_prefill_threshold if config.chunked_prefill else 0
        if cap and len(scheduled) > 1 and max(scheduled.values()) > cap + config.num_spec_tokens:
            raise Violation("I8", f"one of several requests has more than {cap} tokens")
        if len(scheduler.running) > min(config.max_num_seqs, config.budget):
            raise Violation("I8", f"{len(scheduler.running)} requests run")
        if not scheduler.requests.keys() >= scheduled.keys():
            raise Violation("I10", "a plan holds a request that has ended")
        if not plan.finished_req_ids.isdisjoint(scheduled) and any(
            new.request_id in plan.finished_req_ids for new in plan.scheduled_new_reqs
        ) != (not plan.finished_req_ids.isdisjoint(scheduled)):
            raise Violation("contract", "a plan holds a request that it calls finished")

    def _check_pause(self, plan: SchedulerOutput) -> None:
        started = [new.request_id for new in plan.scheduled_new_reqs]
        if self.pause_mode == "keep" and plan.num_scheduled_tokens:
            raise Violation("I8", "tokens are planned while everything is paused")
        if any(request_id in self.never_started for request_id in started):
            raise Violation("I8", f"{started} start while the engine is paused")

    # ---------------------------------------------------------------- I14

    def _note_preemption(self, request_id: str) -> None:
        stream = self.streams.get(request_id)
        if stream is None or request_id not in self.running:
            return
        del self.running[request_id]
        stream.num_preemptions += 1
        self.num_preemptions += 1
        self.num_twice_preempted += stream.num_preemptions == 2
        stream.num_planned = 0

    def _note_start(self, plan: SchedulerOutput, request_id: str, num_hit: int) -> None:
        if request_id in self.running:
            raise Violation("contract", f"{request_id} starts while it runs")
        stream = self.streams[request_id]
        stream.num_planned = num_hit
        if self.never_started.pop(request_id, 0) is None:
            stream.num_first_hits = num_hit
            self.num_hit_tokens += num_hit
            self.num_lookup_tokens += len(stream.tokens)
        self.running[request_id] = None
        planned = plan.num_scheduled_tokens[request_id]
        if plan.total_num_scheduled_tokens == self.config.budget and num_hit + planned < len(
            stream.tokens
        ):
            self.num_budget_exhausted += 1

    def _check_victims(self, plan: SchedulerOutput) -> None:
        """Those who lost their blocks are the least important ones of those who ran."""
        victims = [r for r in self.running if r in plan.preempted_req_ids]
        others = [r for r in self.running if r not in plan.preempted_req_ids]
        # Under a window the device does not know which blocks a request still holds.
        if not victims or not others or self.config.window is not None:
            return
        order = {request_id: (i, 0.0, "") for i, request_id in enumerate(self.running)}
        key = self._sort_key if self.config.policy == "priority" else order.__getitem__
        # A victim whose blocks are all shared would give none back.
        others = [r for r in others if self._holds_own_blocks(r)]
        if not others:
            return
        best, worst = min(victims, key=key), max(others, key=key)
        if key(best) < key(worst):
            raise Violation("I14", f"{best} was preempted, {worst} is less important and runs")

    def _holds_own_blocks(self, request_id: str) -> bool:
        """Whether the device knows a block that this request alone holds."""
        row = self.ghost.rows.get(request_id)
        return row is not None and any(self.ghost.holders[block] == 1 for block in row.table)

    def _check_order(self, plan: SchedulerOutput, scheduler: Scheduler) -> None:
        """Nobody starts while somebody waits who came before, and could start."""
        started = [new.request_id for new in plan.scheduled_new_reqs]
        if scheduler.suspects:
            return
        if self.config.policy == "fcfs":
            first = [r for r in started if r in self.never_started]
            # One whose grammar does not compile ends when its turn comes.
            ready = [
                request_id
                for request_id in (self.never_started if first else ())
                if self._is_ready(request_id) and not self.streams[request_id].has_bad_grammar
            ]
            due = ready[: len(first)]
            if first != due:
                raise Violation("I14", f"{first} started, it was the turn of {due}")
            if first:
                self._check_nobody_was_passed_over(plan, scheduler)
            return
        waiting = [
            request.request_id
            for request in scheduler.waiting
            if not self._is_in_flight(request.request_id)
            and self._is_ready(request.request_id)
            and not (self.pause_mode and request.request_id in self.never_started)
            and request.request_id not in plan.preempted_req_ids
        ]
        keys = [self._sort_key(request_id) for request_id in started]
        if keys != sorted(keys):
            raise Violation("I14", f"{started} started in this order, against their priorities")
        if waiting and min(map(self._sort_key, waiting)) < keys[-1]:
            raise Violation("I14", f"{started[-1]} started before more important ones")

    def _check_nobody_was_passed_over(self, plan: SchedulerOutput, scheduler: Scheduler) -> None:
        """Preempted requests come back before new ones start."""
        for request in scheduler.waiting:
            request_id = request.request_id
            if (
                request_id not in self.never_started
                and request_id not in plan.preempted_req_ids
                and not self._is_in_flight(request_id)
            ):
                raise Violation("I14", f"new requests started before the preempted {request_id}")

    def _is_ready(self, request_id: str) -> bool:
        """Whether its grammar, if it has one, is compiled."""
        return self.streams[request_id].ready_at <= self.clock.monotonic()

    def _sort_key(self, request_id: str) -> tuple[int, float, str]:
        add = self.streams[request_id].add
        return (add.priority, add.arrival, request_id)

    def _is_in_flight(self, request_id: str) -> bool:
        assert self.core is not None
        last_step = self.streams[request_id].last_step
        return any(plan.step_id == last_step for _, plan in self.core.batch_queue)

    # ---------------------------------------------------------------- I15

    def _check_work_conserving(self, plan: SchedulerOutput, scheduler: Scheduler) -> None:
        """Budget was left over: nobody who could use it was left out."""
        assert self.core is not None
        scheduled = plan.num_scheduled_tokens
        if (
            not scheduled
            and not self.core.batch_queue
            and any(map(self._is_ready, scheduler.requests))
        ):
            raise Violation("I15", "an empty step with requests there and nothing in flight")
        left = self.config.budget - plan.total_num_scheduled_tokens
        kv = scheduler.kv_cache_manager
        is_short = False
        if len(scheduler.running) > len(scheduled):
            at_turn = self.config.budget
            for request in scheduler.running:
                if request.request_id in scheduled:
                    at_turn -= scheduled[request.request_id]
                    continue
                if self._surely_ends(request):
                    continue
                computed = request.num_computed_tokens
                if self.config.num_spec_tokens and computed >= scheduler.max_seq_tokens - 1:
                    continue  # if the drafts in flight are right, it has ended
                # By the budget and the cap at its turn: fewer tokens may fit where those do not.
                needed = min(
                    request.num_tokens + request.num_output_placeholders - computed,
                    at_turn,
                    self._tokens_per_request_cap(scheduler),
                )
                held = len(kv._tables[request.request_id].block_ids)
                missing = -(-(computed + needed) // kv.block_size) - held
                # Preempting others, or their windows, may have freed blocks after its turn.
                may_be_late = self.config.window is not None or plan.preempted_req_ids
                free = 0 if may_be_late else kv.pool.num_free_blocks
                if left > 0 and needed > 0 and missing <= free:
                    raise Violation("I15", f"{request.request_id} could run, and does not")
                is_short = True
        if is_short or (plan.preempted_req_ids and scheduled) or not len(scheduler.waiting):
            return
        self._check_head_of_queue(plan, scheduler, left)

    def _tokens_per_request_cap(self, scheduler: Scheduler) -> int:
        """The threshold of long prompts does not hold for a request that is alone."""
        is_alone = len(scheduler.running) + len(scheduler.waiting) == 1
        threshold = self.config.long_prefill_threshold
        return threshold if threshold and not is_alone else self.config.budget

    def _surely_ends(self, request: Request) -> bool:
        """Whether tokens on their way surely end it: a draft may be refused, one is certain."""
        placeholders = request.num_output_placeholders
        certain = min(placeholders, 1) if self.config.num_spec_tokens else placeholders
        return placeholders > 0 and request.num_tokens + certain >= request.max_total_tokens

    def _check_head_of_queue(self, plan: SchedulerOutput, scheduler: Scheduler, left: int) -> None:
        config = self.config
        if len(scheduler.running) >= min(config.max_num_seqs, config.budget):
            return
        for request in scheduler.waiting:
            # What a reset threw away does not count as in flight, though its blocks are fenced.
            awaits_result = request.last_step_id >= 0 and self._is_in_flight(request.request_id)
            if awaits_result or not self._is_ready(request.request_id):
                continue
            tokens = request.num_tokens
            if not config.chunked_prefill and tokens > left:
                return
            blocks = -(-tokens // config.block_size)
            if scheduler.running:
                blocks += int(config.watermark * config.num_blocks)
            if blocks <= scheduler.kv_cache_manager.pool.num_free_blocks:
                raise Violation("I15", f"{request.request_id} could start, and does not")
            return
