"""The scheduler: shares one token budget among requests, step by step.

There is no prefill phase and no decode phase. A request needs as many tokens as it knows and has
not computed; ``schedule`` gives every running request what it needs until the budget is used,
then starts waiting ones. ``update_from_output`` takes the results of a step, in step order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.clock import Clock
from twostep.contracts.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    PrefillStats,
    SchedulerStats,
)
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.kv_cache.kv_cache_manager import KVCacheManager
from twostep.scheduler.config_check import check_config
from twostep.scheduler.plan_builder import PlanBuilder, num_computed_before
from twostep.scheduler.queues import make_request_queue
from twostep.scheduler.request import Request, RequestStatus
from twostep.scheduler.stats import StatsCounter
from twostep.scheduler.stopping import append_and_check_stop

_NO_REPLY = "the executor returned no token for this request"


class Scheduler:
    """Plans steps one at a time: each result is processed before the next plan is made."""

    num_steps_in_flight = 1

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        clock: Clock,
        *,
        num_spec_tokens: int = 0,
    ) -> None:
        """``num_spec_tokens``: draft tokens that a drafter proposes for each step."""
        check_config(scheduler_config, cache_config)
        self.config = scheduler_config
        self.num_spec_tokens = num_spec_tokens
        # A running request needs at least one token of budget in every step.
        self.max_num_running_reqs = min(
            scheduler_config.max_num_seqs, scheduler_config.max_num_batched_tokens
        )
        self.kv_cache_manager = KVCacheManager(
            cache_config,
            max_model_len=scheduler_config.max_model_len,
            max_in_flight_tokens=(
                self.num_steps_in_flight * scheduler_config.max_num_batched_tokens
            ),
        )
        self.max_seq_tokens = min(
            scheduler_config.max_model_len,
            self.kv_cache_manager.max_tokens_per_request or scheduler_config.max_model_len,
        )
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = make_request_queue(scheduler_config.policy)
        self.finished_req_ids: set[str] = set()
        self.preempted_req_ids: set[str] = set()
        self.suspects: dict[str, None] = {}
        """Requests of a failed step that were not proved innocent yet, in order."""
        self._clock = clock
        self._next_step_id = 0
        self._stats = StatsCounter()

    # ---------------------------------------------------------------- requests come and go

    def make_request(self, request: EngineCoreRequest) -> Request:
        """The scheduler's record of a request, its prompt hashed."""
        record = Request(
            request, max_seq_tokens=self.max_seq_tokens, next_step_id=self._next_step_id
        )
        self.kv_cache_manager.hash_new_blocks(record)
        return record

    def add_request(self, request: Request) -> None:
        """Queue a request. The engine core has checked that it can be served at all."""
        assert request.request_id not in self.requests, "request ids are unique"
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(
        self, request_ids: Iterable[str] | None, status: RequestStatus
    ) -> list[tuple[str, int]]:
        """End requests from outside; None means all. Unknown and finished ids are ignored.

        Returns (request id, client index) of those that ended now. Results of theirs that are
        still in flight will be skipped.
        """
        assert status.is_finished
        ids = list(self.requests) if request_ids is None else request_ids
        ended = []
        for request_id in ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, status)
                ended.append((request_id, request.client_index))
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether some request has not ended."""
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Whether there is something to plan, or news the executor has not been told."""
        return bool(self.requests or self.finished_req_ids or self.preempted_req_ids)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached content, for instance after the weights changed.

        False, and nothing happens, while requests hold blocks. ``reset_running_requests``
        preempts those first, and throws away what is still in flight of them.
        """
        if reset_running_requests:
            for request in reversed(self.running.copy()):
                self._preempt(request, drop_stale=True)
        return self.kv_cache_manager.reset_prefix_cache()

    # ---------------------------------------------------------------- the plan

    def schedule(self) -> SchedulerOutput:
        """Plan the next step: who runs how many tokens, into which blocks.

        A plan of 0 tokens carries finished and preempted ids, or nothing at all.
        """
        step = PlanBuilder(self._next_step_id, self.config.max_num_batched_tokens)
        if self.suspects:
            self._schedule_suspect(step)
        else:
            self._schedule_running(step)
            if step.may_start_requests:
                self._schedule_waiting(step)
        plan = step.build(
            self.config.max_num_batched_tokens - step.token_budget,
            self.finished_req_ids,
            self.preempted_req_ids,
        )
        self._update_after_schedule(plan)
        return plan

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Allowed tokens of the plan's structured requests; None as there are none of them."""
        assert not scheduler_output.has_structured_output_requests
        return None

    def _schedule_running(self, step: PlanBuilder) -> None:
        """Front to back: every running request gets what it needs, while the budget lasts."""
        cap = self._tokens_per_request_cap()
        for request in self.running.copy():
            if step.token_budget == 0:
                break
            if step.has_preempted and request.status is not RequestStatus.RUNNING:
                continue
            self._schedule_running_request(request, step, cap)

    def _schedule_running_request(self, request: Request, step: PlanBuilder, cap: int) -> None:
        placeholders = request.num_output_placeholders
        if placeholders and self._must_wait_for_tokens(request, placeholders):
            return
        num_new = request.num_tokens + placeholders - request.num_computed_tokens
        if request.spec_token_ids:
            num_new = self._with_spec_tokens(request, num_new)
        if num_new > cap:
            num_new = cap
        if num_new > step.token_budget:
            num_new = step.token_budget
        if num_new <= 0:
            return
        new_ids = self.kv_cache_manager.allocate_slots(request, num_new, step.step_id)
        if new_ids is None:
            new_ids = self._preempt_for(request, num_new, step)
            if new_ids is None:
                return
        step.add_running(request, num_new, new_ids)
        if request.spec_token_ids:
            self._schedule_spec_tokens(request, num_new, step)

    def _schedule_waiting(self, step: PlanBuilder) -> None:
        """Start waiting requests in queue order; the first one that does not fit ends the pass."""
        cap = self._tokens_per_request_cap()
        skipped: list[Request] = []
        while (
            self.waiting and step.token_budget > 0 and len(self.running) < self.max_num_running_reqs
        ):
            request = self.waiting.peek_request()
            if self._cannot_start_yet(request):
                skipped.append(self.waiting.pop_request())
                continue
            if not self._try_start(request, step, cap):
                break
            self.waiting.pop_request()
        for request in reversed(skipped):
            self.waiting.prepend_request(request)

    def _schedule_suspect(self, step: PlanBuilder) -> None:
        """Run one request of a failed step alone, until it samples a token or fails.

        It gets all blocks, and nothing is planned while a result of it is awaited, so that a
        failure is surely its own.
        """
        request = self.requests[next(iter(self.suspects))]
        if self._is_in_flight(request):
            return
        cap = self._tokens_per_request_cap()
        if request.status is RequestStatus.RUNNING:
            self._schedule_running_request(request, step, cap)
            return
        for other in reversed(self.running.copy()):
            self._preempt(other)
        has_started = self._try_start(request, step, cap)
        assert has_started, "the whole pool is free, and admission checked that it is enough"
        self.waiting.remove_request(request)

    def _tokens_per_request_cap(self) -> int:
        """Most tokens one request may take in a step; while it is alone, all of them."""
        threshold = self.config.long_prefill_token_threshold
        if threshold > 0 and len(self.running) + len(self.waiting) > 1:
            return threshold
        return self.config.max_num_batched_tokens

    def _must_wait_for_tokens(self, request: Request, placeholders: int) -> bool:
        """Whether the tokens on their way decide what comes next.

        They surely reach the length limit (a draft may be refused, so only one token is certain
        then); or a grammar must see them before the next token is sampled. Such a request sits
        out a step alone, instead of holding back the sampling of the whole batch.
        """
        certain = 1 if self.num_spec_tokens else placeholders
        return (
            request.num_tokens + certain >= request.max_total_tokens
            or request.use_structured_output
        )

    def _cannot_start_yet(self, request: Request) -> bool:
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return True
        # Tokens made before a preemption are still to come, and belong to the prompt by then.
        return self._is_in_flight(request) and request.last_step_id >= request.drop_before_step

    def _is_in_flight(self, request: Request) -> bool:
        return request.last_step_id > self.kv_cache_manager.last_processed_step

    def _try_start(self, request: Request, step: PlanBuilder, cap: int) -> bool:
        """Give a waiting request its blocks and its first tokens. False if it does not fit.

        The caller takes it out of the queue.
        """
        kv = self.kv_cache_manager
        hit_blocks = kv.get_computed_blocks(request)
        num_hit = len(hit_blocks) * kv.block_size
        num_new = request.num_tokens - num_hit
        if self.config.enable_chunked_prefill:
            num_new = min(num_new, cap, step.token_budget)
        elif num_new > step.token_budget:
            return False
        if not kv.allocate_first_slots(
            request,
            num_new,
            step.step_id,
            hit_blocks,
            full_sequence_must_fit=self.config.full_sequence_must_fit,
        ):
            return False
        request.num_computed_tokens = num_hit
        if not request.has_been_scheduled:
            request.has_been_scheduled = True
            self._note_prefix_hits(request, num_hit)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        step.add_new(request, num_new, kv.get_block_ids(request.request_id))
        return True

    def _note_prefix_hits(self, request: Request, num_hit: int) -> None:
        """Told once for each request: a resumption would only find its own blocks again."""
        request.prefill_stats = PrefillStats(
            num_prompt_tokens=request.num_prompt_tokens, num_cached_tokens=num_hit
        )
        self._stats.count_lookup(request.num_tokens, num_hit)

    def _with_spec_tokens(self, request: Request, num_new: int) -> int:
        """Drafts on top, but no further than the longest sequence allows."""
        room = self.max_seq_tokens - 1 - request.num_computed_tokens
        return min(num_new + len(request.spec_token_ids), room)

    def _schedule_spec_tokens(self, request: Request, num_new: int, step: PlanBuilder) -> None:
        known = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        if num_new > known:
            step.add_spec_tokens(request, request.spec_token_ids[: num_new - known])
        request.spec_token_ids = []

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """The plan is made: advance the counters as if it had run."""
        step_id = scheduler_output.step_id
        requests = self.requests
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request = requests[request_id]
            request.last_step_id = step_id
            request.num_computed_tokens += num_scheduled
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )
        self._next_step_id = step_id + 1
        self.finished_req_ids = set()
        self.preempted_req_ids = set()

    # ---------------------------------------------------------------- preemption

    def _preempt_for(self, request: Request, num_new: int, step: PlanBuilder) -> list[int] | None:
        """Preempt others, least important first, until the request's tokens have blocks.

        None if it cannot run in this step: it was the least important itself, or the blocks it
        needs are on their way back from steps in flight.
        """
        while not self.kv_cache_manager.fits_when_released(request, num_new):
            victim = self._pick_victim()
            if step.remove_running(victim):
                self.kv_cache_manager.withdraw(victim, victim.num_computed_tokens)
            self._preempt(victim)
            step.has_preempted = True
            if victim is request:
                return None
        new_ids = self.kv_cache_manager.allocate_slots(request, num_new, step.step_id)
        step.awaits_blocks |= new_ids is None
        return new_ids

    def _pick_victim(self) -> Request:
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: request.sort_key)
        return self.running[-1]

    def _preempt(self, request: Request, *, drop_stale: bool = False) -> None:
        """Take row and blocks from a running request; it waits at the front with all its tokens.

        Tokens of steps in flight are still delivered, unless ``drop_stale``.
        """
        self.running.remove(request)
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        if drop_stale:
            request.drop_before_step = self._next_step_id
        self.waiting.prepend_request(request)
        self.preempted_req_ids.add(request.request_id)
        self._stats.num_preemptions += 1

    # ---------------------------------------------------------------- the results

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the result of the oldest step in flight; returns news by client index."""
        step_id = scheduler_output.step_id
        self.kv_cache_manager.step_processed(step_id)
        sampled = dict(
            zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids, strict=False)
        )
        news: dict[int, list[EngineCoreOutput]] = {}
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or step_id < request.drop_before_step:
                continue
            output = self._update_request(
                request, sampled.get(request_id), scheduler_output, model_runner_output
            )
            if output is not None:
                news.setdefault(request.client_index, []).append(output)
        return self._make_outputs(news)

    def _update_request(
        self,
        request: Request,
        token_ids: list[int] | None,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        """One row of a result: keep its tokens, end the request if it is done."""
        request_id = request.request_id
        failure = model_runner_output.failed_req_ids.get(request_id)
        if (
            failure is None
            and not token_ids
            and self._should_have_sampled(request, token_ids, scheduler_output.step_id)
        ):
            failure = _NO_REPLY
        if failure is not None:
            return self._fail(request, failure)
        assert token_ids is not None
        if model_runner_output.prompt_logprobs:
            self._collect_prompt_logprobs(request, scheduler_output, model_runner_output)
        if not token_ids:
            return None
        if scheduler_output.scheduled_spec_decode_tokens:
            self._roll_back_refused_drafts(request, len(token_ids), scheduler_output)
        token_ids, stopped = self._update_request_with_output(request, token_ids)
        if self.suspects:
            self.suspects.pop(request_id, None)
        logprobs = model_runner_output.logprobs.get(request_id)
        return EngineCoreOutput(
            request_id=request_id,
            new_token_ids=token_ids,
            new_logprobs=None if logprobs is None else logprobs[: len(token_ids)],
            new_prompt_logprobs=(
                None if request.prompt_logprobs is None else request.take_prompt_logprobs()
            ),
            finish_reason=request.status.finish_reason if stopped else None,
            stop_reason=request.stop_reason,
            prefill_stats=(None if request.prefill_stats is None else request.take_prefill_stats()),
            num_preemptions=request.num_preemptions,
        )

    def _update_request_with_output(
        self, request: Request, token_ids: list[int]
    ) -> tuple[list[int], bool]:
        """Append tokens up to the first stop; returns those kept, and whether it stopped.

        A preempted request has no placeholders any more, but its tokens still arrive.
        """
        end: RequestStatus | None = None
        for index, token_id in enumerate(token_ids, start=1):
            end = append_and_check_stop(request, token_id)
            if end is not None:
                token_ids = token_ids[:index]
                break
        if request.num_output_placeholders:
            request.num_output_placeholders -= len(token_ids)
        kv = self.kv_cache_manager
        if request.num_tokens % kv.block_size < len(token_ids):
            kv.hash_new_blocks(request)
            kv.publish_new_blocks(request)
        if end is not None:
            self._finish(request, end)
        return token_ids, end is not None

    def _should_have_sampled(
        self, request: Request, token_ids: list[int] | None, step_id: int
    ) -> bool:
        """Whether a missing token is the executor's fault: it would never be asked for again."""
        if token_ids is None:
            return True
        return request.last_step_id == step_id and not request.is_prefill_chunk

    def _roll_back_refused_drafts(
        self, request: Request, num_tokens: int, scheduler_output: SchedulerOutput
    ) -> None:
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(request.request_id)
        if not drafts or request.status is not RequestStatus.RUNNING:
            return  # a preempted request starts from 0 anyway
        refused = len(drafts) + 1 - num_tokens
        request.num_computed_tokens -= refused
        if request.num_output_placeholders:
            request.num_output_placeholders -= refused

    def _collect_prompt_logprobs(
        self,
        request: Request,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> None:
        chunk = model_runner_output.prompt_logprobs.get(request.request_id)
        if chunk:
            request.collect_prompt_logprobs(
                num_computed_before(scheduler_output, request.request_id), chunk
            )

    def _make_outputs(
        self, news: dict[int, list[EngineCoreOutput]]
    ) -> dict[int, EngineCoreOutputs]:
        """One message for each client; the statistics go to one of them."""
        stats: SchedulerStats | None = self._stats.take(
            self.running, self.waiting, self.kv_cache_manager.usage
        )
        timestamp = self._clock.monotonic()
        outputs = {}
        for client_index, client_outputs in (news or {0: []}).items():
            outputs[client_index] = EngineCoreOutputs(
                outputs=client_outputs, scheduler_stats=stats, timestamp=timestamp
            )
            stats = None
        return outputs

    # ---------------------------------------------------------------- the end

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Take a request out of everything; the next plan tells the executor."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove_request(request)
        request.status = status
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        if request.has_been_scheduled:
            self.finished_req_ids.add(request.request_id)
        self.suspects.pop(request.request_id, None)

    def _fail(self, request: Request, reason: str) -> EngineCoreOutput:
        """End one request with an error; nobody will find its KV again."""
        self.kv_cache_manager.withdraw(request)
        self._finish(request, RequestStatus.FINISHED_ERROR)
        request.stop_reason = reason
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=RequestStatus.FINISHED_ERROR.finish_reason,
            stop_reason=reason,
            prefill_stats=request.take_prefill_stats(),
            num_preemptions=request.num_preemptions,
        )

    def fail_steps(
        self, plans: Sequence[SchedulerOutput], reason: str, *, find_culprit: bool = True
    ) -> dict[int, EngineCoreOutputs]:
        """The first of these plans failed; the others, planned on top of it, are void with it.

        Every running request loses its KV and is computed again, which changes no token. If
        one request was alone in the failed plan, it is the culprit and ends with ``reason``.
        Otherwise (unless ``find_culprit`` is False) those of the plan run one by one until the
        culprit fails alone. The device is idle when this is called.
        """
        failed = plans[0]
        members = [
            request
            for request_id in failed.num_scheduled_tokens
            if (request := self.requests.get(request_id)) is not None
            and failed.step_id >= request.drop_before_step
        ]
        self.kv_cache_manager.withdraw_since(failed.step_id)
        self.kv_cache_manager.step_processed(plans[-1].step_id)
        for request in reversed(self.running.copy()):
            self._preempt(request, drop_stale=True)
        for plan in plans:
            # Nobody knows how far the runner got; it ignores ids that it has no row for.
            self.finished_req_ids |= plan.finished_req_ids
            self.preempted_req_ids |= plan.preempted_req_ids
        news: dict[int, list[EngineCoreOutput]] = {}
        if find_culprit and len(members) == 1:
            news[members[0].client_index] = [self._fail(members[0], reason)]
        elif find_culprit:
            self.suspects.update(dict.fromkeys(request.request_id for request in members))
        return self._make_outputs(news)
