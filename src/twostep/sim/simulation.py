"""Runs a case: the real engine core on a ghost device, with all checks after every step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from typing import Literal

import msgspec

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.outputs import EngineCoreOutputs
from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import FinishReason
from twostep.engine.core import EngineCore
from twostep.sim.case import (
    Abort,
    Add,
    Case,
    CaseConfig,
    ClockJump,
    Event,
    FaultKind,
    Glitch,
    GlitchKind,
    Pause,
    ResetCache,
    Resume,
)
from twostep.sim.clock import VirtualClock
from twostep.sim.ghost import GhostExecutor
from twostep.sim.ghost_grammar import GhostGrammarCompiler
from twostep.sim.invariants import (
    check_blocks,
    check_cached_content,
    check_drained,
    check_requests,
    check_stats,
)
from twostep.sim.kv_events import EventMirror
from twostep.sim.plan_rules import PlanRules
from twostep.sim.streams import ContentHashes, Stream
from twostep.sim.violation import Violation

MAX_FAILURES = 10
"""Steps that one request may make fail before it ends."""

_ENCODER = msgspec.msgpack.Encoder()


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    check: str
    message: str
    step: int
    """Calls of the step function before it."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a case."""

    seed: int | None
    is_async: bool
    steps: int
    digest: str
    """Of all plans and news, in order: the same for the same case."""
    counts: dict[str, int]
    sometimes: dict[str, int]
    violation: Found | None
    seconds: float


def run_case(case: Case) -> Outcome:
    """Run a case to its end, or to the first violation."""
    simulation = Simulation(case)
    start = time.perf_counter()
    found: Found | None = None
    with _quiet_engine():
        try:
            simulation.run()
        except Violation as violation:
            found = Found(
                check=violation.check, message=violation.message, step=simulation.num_steps
            )
        except Exception as error:
            where = _innermost_frame(error)
            found = Found(
                check="crash",
                message=f"{type(error).__name__}: {error} ({where})",
                step=simulation.num_steps,
            )
    return Outcome(
        seed=case.seed,
        is_async=case.config.is_async,
        steps=simulation.num_steps,
        digest=simulation.log.hexdigest(),
        counts=dict(simulation.final_counts()),
        sometimes=simulation.sometimes(),
        violation=found,
        seconds=time.perf_counter() - start,
    )


class Interrupt(BaseException):
    """Ctrl-C."""


_INTERRUPTS: dict[str, GlitchKind] = {
    "execute": "interrupt launch",
    "sample": "interrupt sampling",
    "result": "interrupt wait",
}


class Simulation:
    """One run. ``run`` raises a Violation at the first broken rule."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.config = config = case.config
        self.clock = VirtualClock()
        self.streams: dict[str, Stream] = {}
        """By id, the latest request with it."""
        self.log = blake2b(digest_size=16)
        self.counts: Counter[str] = Counter()
        self.num_steps = 0
        self.faults_are_on = True
        self.hashes = ContentHashes(config.block_size) if config.caching else None
        self.ghost = GhostExecutor(
            config.block_size,
            window=config.window,
            max_concurrent_batches=2 if config.is_async else 1,
            num_drafts=config.num_spec_tokens,
        )
        self.ghost.received = self._log_plan  # type: ignore[method-assign]
        self.rules = PlanRules(config, self.streams, self.ghost, self.clock)
        self.core = make_core(config, self.ghost, self.clock, self.rules)
        self.rules.core = self.core
        self._glitches: list[GlitchKind] = []
        self._faulty: set[str] = set()
        self._prompts: dict[tuple[int, ...], set[int]] = {}
        self._groups: dict[int, list[str]] = {}
        self.all_ids: set[str] = set()
        self.max_seq_tokens = self._max_seq_tokens()
        self.mirror = EventMirror(self.hashes) if config.kv_events and self.hashes else None
        self._install_faults()

    def run(self) -> None:
        """Events and steps; then the faults stop, everything drains, and one more request runs."""
        events = self.case.events
        position = 0
        for step in range(self.case.steps):
            while position < len(events) and events[position].step <= step:
                self._apply(events[position])
                position += 1
            self._step()
        self._stop_faults()
        if len(self.core.scheduler.waiting):
            self.counts["drain with waiting requests"] += 1
        self._drain("I16")
        self._run_one_more()

    # ---------------------------------------------------------------- one step

    def _step(self) -> None:
        core = self.core
        scheduler = core.scheduler
        self.num_steps += 1
        self.clock.advance_to(self.clock.monotonic() + 0.001)
        steps_before = self.rules.last_step_id
        try:
            outputs, executed = core.step_fn()
        except Interrupt:
            self.counts["interrupts"] += 1
            outputs, executed = {}, False
        if outputs is None and not executed and core.has_work() and core.batch_queue:
            raise Violation("I15", "a step planned nothing and finished nothing")
        if executed and self.rules.last_step_id == steps_before:
            raise Violation("contract", "a step that planned nothing says it has")
        if outputs:
            self._receive(outputs)
        check_requests(
            scheduler,
            self.streams,
            2 * self.config.num_spec_tokens,
            is_mid_step=bool(core.batch_queue) and not self.config.is_async,
        )
        kv = scheduler.kv_cache_manager
        check_blocks(kv, thoroughly=self.num_steps % 32 == 0)
        if self.hashes is not None and not self._a_step_has_failed():
            check_cached_content(kv, self.ghost.block_values, self.hashes.of)
        if self.mirror is not None and outputs:
            self.mirror.compare(kv.pool.cached.keys())
        if not kv.pool.num_free_blocks:
            self.counts["no block is free"] += 1

    def _a_step_has_failed(self) -> bool:
        """Whether a plan waits to be withdrawn."""
        return self.ghost.broken_by is not None or any(
            not hasattr(future, "result") for future, _ in self.core.batch_queue
        )

    def _receive(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client, message in outputs.items():
            self.log.update(_ENCODER.encode(message))
            if message.scheduler_stats is not None:
                check_stats(message.scheduler_stats, self.core.scheduler)
            if message.kv_events and self.mirror is not None:
                self.mirror.apply(message.kv_events)
            for output in message.outputs:
                stream = self.streams.get(output.request_id)
                if stream is None:
                    raise Violation("I10", f"news of {output.request_id}, whom nobody knows")
                stream.receive(output, client)
                if output.new_token_ids and output.request_id in self.core.scheduler.suspects:
                    raise Violation("isolation", f"{output.request_id} ran, and is still suspected")
                if stream.finish is not None:
                    self.counts["grammar error"] += stream.has_bad_grammar
                    self.counts["tokens"] += stream.num_outputs
                    self.rules.ended(output.request_id)
                    self.counts[f"finished: {stream.finish}"] += 1

    def _log_plan(self, plan: SchedulerOutput, data: bytes) -> None:
        """The order of a set is not part of a plan."""
        if len(plan.finished_req_ids) > 1 or len(plan.preempted_req_ids) > 1:
            names = ("finished_req_ids", "preempted_req_ids")
            plain = msgspec.structs.replace(plan, **dict.fromkeys(names, frozenset()))
            sets = [sorted(getattr(plan, name)) for name in names]
            data = _ENCODER.encode((plain, sets))
        self.log.update(data)

    # ---------------------------------------------------------------- events

    def _apply(self, event: Event) -> None:
        if isinstance(event, Add):
            self._add(event)
        elif isinstance(event, Abort):
            self._abort(event)
        elif isinstance(event, Glitch):
            self._glitches.append(event.kind)
        elif isinstance(event, Pause):
            self._pause(event)
        elif isinstance(event, Resume):
            self.core.resume()
        elif isinstance(event, ClockJump):
            self.clock.advance_to(self.clock.monotonic() + event.seconds)
        else:
            self._reset(event)

    def _add(self, add: Add) -> None:
        if len(self.core.scheduler.requests) >= self.config.max_live:
            self.counts["turned away"] += 1
            return
        request_id = add.request_id
        earlier = self.streams.get(request_id)
        is_taken = earlier is not None and earlier.is_live
        if earlier is not None and is_taken and earlier.may_have_ended:
            return  # its client waits for the news of its end
        prompt = add.prompt()
        room = self.max_seq_tokens - len(prompt)
        stream = Stream(add, prompt, min(add.max_tokens, room), self.hashes)
        stream.ready_at = self.clock.monotonic() + add.grammar_seconds
        is_refusable = is_taken or room <= 0 or not prompt
        try:
            self.core.add_request(stream.request())
        except InvalidRequestError:
            if not is_refusable:
                raise Violation("contract", f"{request_id} was refused without reason") from None
            self.counts["refused at admission"] += 1
            return
        if is_refusable:
            raise Violation("contract", f"{request_id} can never be served, and was admitted")
        self.counts["requests"] += 1
        self.streams[request_id] = stream
        self.rules.never_started[request_id] = None
        self.all_ids.add(request_id)
        self._faulty.discard(request_id)
        if add.fault and self.faults_are_on:
            self._faulty.add(request_id)
        if add.group:
            self._groups.setdefault(add.group, []).append(request_id)
        if self.hashes is not None:
            salts = self._prompts.setdefault(tuple(prompt), set())
            self.counts["same prompt, other salt"] += bool(salts - {add.salt})
            salts.add(add.salt)

    def _reset(self, event: ResetCache) -> None:
        kv = self.core.scheduler.kv_cache_manager
        done = self.core.reset_prefix_cache(reset_running_requests=event.running)
        self.counts["cache resets"] += done
        if done and kv.pool.cached:
            raise Violation("I7", "the prefix cache was reset, and content can still be found")
        if done == bool(kv._tables):
            raise Violation("contract", f"a reset with {len(kv._tables)} tables told {done}")
        check_blocks(kv, thoroughly=True)

    def _pause(self, event: Pause) -> None:
        if event.mode == "abort":
            for request_id, stream in self.streams.items():
                if stream.is_live:
                    stream.is_pause_aborted = True
                    self.rules.ended(request_id)
        self.core.pause(event.mode)
        self.counts["pauses"] += 1

    def _abort(self, event: Abort) -> None:
        in_flight: set[str] = set()
        for _, plan in self.core.batch_queue:
            in_flight.update(plan.num_scheduled_tokens)
        for request_id in event.request_ids:
            stream = self.streams.get(request_id)
            self.counts["aborts"] += 1
            if stream is None or not stream.is_live:
                continue
            self.counts["aborted with a step in flight"] += request_id in in_flight
            group = self._groups.get(stream.add.group, ())
            if any(self.streams[other].is_live for other in group if other != request_id):
                self.counts["branch of n > 1 aborted"] += 1
            if event.via_queue:
                stream.abort_queued()
            else:
                stream.is_aborted = True
                self.rules.ended(request_id)
                self.rules.num_aborted += 1
        if event.via_queue:
            self.core.aborts_queue.put(list(event.request_ids))
        else:
            self.core.abort_requests(event.request_ids)
            check_blocks(self.core.scheduler.kv_cache_manager)

    # ---------------------------------------------------------------- faults

    def _install_faults(self) -> None:
        ghost = self.ghost
        ghost.fail_execute = lambda plan: self._failure(plan, "execute")
        ghost.fail_sample = lambda plan: self._failure(plan, "sample")
        ghost.fail_result = lambda plan: self._failure(plan, "result")
        ghost.bad_rows = lambda plan: dict.fromkeys(self._culprits(plan, "nan"), "NaN logits")
        ghost.lost_rows = lambda plan: set(self._culprits(plan, "lost"))
        ghost.unmasked_rows = lambda plan: set(self._culprits(plan, "unmasked"))

    def _culprits(self, plan: SchedulerOutput, kind: FaultKind) -> list[str]:
        """Requests of the plan that reach the position at which they fail, in this way."""
        if not self._faulty:
            return []
        return [
            request_id
            for request_id in plan.num_scheduled_tokens
            if request_id in self._faulty
            and (stream := self.streams[request_id]).add.fault == kind
            and stream.is_live
            and stream.add.fault_at <= stream.num_planned
        ]

    def _failure(
        self, plan: SchedulerOutput, kind: Literal["execute", "sample", "result"]
    ) -> BaseException | None:
        if self._faulty and (culprits := self._culprits(plan, kind)):
            self.counts["steps failed by a request"] += 1
            for request_id in culprits:
                self._note_failure(request_id)
            return RuntimeError("poisoned request")
        interrupt = _INTERRUPTS.get(kind)
        if interrupt in self._glitches:
            self._glitches.remove(interrupt)
            return Interrupt()
        if kind in self._glitches and len(plan.num_scheduled_tokens) > 1:
            self._glitches.remove(kind)
            self.counts["steps failed by a glitch"] += 1
            return OSError("cosmic ray")
        return None

    def _note_failure(self, request_id: str) -> None:
        """Once in company, once alone: then it must end. Resets and aborts may cost a few more."""
        stream = self.streams[request_id]
        stream.num_failures += 1
        if stream.num_failures > MAX_FAILURES:
            raise Violation("isolation", f"{request_id} made {MAX_FAILURES} steps fail, and lives")

    def _stop_faults(self) -> None:
        self.faults_are_on = False
        self._glitches.clear()
        self._faulty.clear()
        self.core.resume()

    # ---------------------------------------------------------------- the end

    def _drain(self, check: str) -> None:
        """Liveness: without faults, the work that is left takes a bounded number of steps."""
        left = sum(len(s.tokens) + s.limit for s in self.streams.values() if s.is_live)
        most = 100 + 4 * left
        first = self.num_steps
        while self.core.has_work():
            if self.num_steps - first > most:
                live = [s.add.request_id for s in self.streams.values() if s.is_live]
                raise Violation(check, f"{live} did not end within {most} steps")
            self._step()
        unfinished = [s.add.request_id for s in self.streams.values() if s.is_live]
        if unfinished:
            raise Violation("I10", f"{unfinished} never ended, and nothing is left to do")
        if self.ghost.rows:
            raise Violation("I3", f"the device still has rows: {list(self.ghost.rows)}")
        self.core._process_aborts_queue()
        check_drained(self.core, self.all_ids)

    def _run_one_more(self) -> None:
        """I17: the drained system takes a new request and answers it."""
        add = Add(step=0, request_id="one more", length=1, max_tokens=2)
        if self.max_seq_tokens < 3:
            return
        self._add(add)
        self._drain("I17")
        if self.streams["one more"].finish is not FinishReason.LENGTH:
            raise Violation("I17", "the drained system does not answer a new request")

    def _max_seq_tokens(self) -> int:
        """Longest sequence that can be served, by the case's own numbers."""
        config = self.config
        if config.window is not None:
            return self.core.scheduler.max_seq_tokens
        return min(config.max_model_len, (config.num_blocks - 1) * config.block_size)

    def final_counts(self) -> Counter[str]:
        """Totals of the run."""
        rules = self.rules
        self.counts["scheduled tokens"] = rules.num_tokens
        self.counts["preemptions"] = rules.num_preemptions
        self.counts["finished: abort"] = rules.num_aborted
        self.counts["prefix hits, tokens"] = rules.num_hit_tokens
        return self.counts

    def sometimes(self) -> dict[str, int]:
        """How often each of the events of ``SOMETIMES`` came up."""
        from twostep.sim.sometimes import SOMETIMES

        rules = self.rules
        found = self.counts + self.ghost.events
        found["budget used up by a chunk"] = rules.num_budget_exhausted
        found["preempted twice"] = rules.num_twice_preempted
        found["step failed while blocks are fenced"] = rules.num_refused_failures
        return {name: found[name] for name in SOMETIMES}


def make_core(
    config: CaseConfig, ghost: GhostExecutor, clock: VirtualClock, rules: PlanRules | None
) -> EngineCore:
    """The engine core of a case."""
    return EngineCore(
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=config.budget,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            policy=config.policy,
            async_scheduling=config.is_async,
            enable_chunked_prefill=config.chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_threshold,
            prefill_burst_tokens=config.prefill_burst,
            crowd_step_tokens=config.crowd_step,
            full_sequence_must_fit=config.full_sequence_must_fit,
        ),
        cache_config=CacheConfig(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.caching,
            sliding_window=config.window,
            watermark=config.watermark,
            enable_kv_cache_events=config.kv_events,
        ),
        executor=ghost,
        clock=clock,
        num_spec_tokens=config.num_spec_tokens,
        grammar_compiler=GhostGrammarCompiler(clock),
        observer=rules,
    )


@contextlib.contextmanager
def _quiet_engine() -> Iterator[None]:
    """Failures are made on purpose here: the log of a thousand of them helps nobody."""
    logger = logging.getLogger("twostep.engine")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _innermost_frame(error: BaseException) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return "nowhere"
    code = frame.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{frame.tb_lineno} in {code.co_name}"
