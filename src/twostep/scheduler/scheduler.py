"""The scheduler: shares one token budget among requests, step by step.

There is no prefill phase and no decode phase. A request needs as many tokens as it knows and has
not computed; ``schedule`` gives every running request what it needs until the budget is used,
then starts waiting ones. ``update_from_output`` takes the results of a step, in step order.

Most requests of most steps are plain decodes: one token into a block they hold, one token back.
Both loops do those in place (``plain_until``, ``has_plain_output``) and call a method for the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from twostep.contracts.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    PrefillStats,
)
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.scheduler.grammars import grammar_output
from twostep.scheduler.plan_builder import PlanBuilder, num_computed_before
from twostep.scheduler.request import Request, RequestStatus
from twostep.scheduler.state import PauseState, SchedulerState
from twostep.scheduler.step_in_flight import StepInFlight
from twostep.scheduler.stopping import check_stop

NEWCOMERS_PER_STREAM = 4
"""A crowd: so many with short prompts wait for their first token for each request that streams."""
SHORT_PROMPT_STEPS = 2
"""Steps that a short prompt takes, at most."""
MAX_CROWD = 32
"""More of those who wait are not looked at: a queue that never ends is no crowd."""
_NO_REPLY = "the executor returned no token for this request"


class Scheduler(SchedulerState):
    """Plans steps one at a time: each result is processed before the next plan is made."""

    # ---------------------------------------------------------------- the plan

    def schedule(self) -> SchedulerOutput:
        """Plan the next step: who runs how many tokens, into which blocks.

        A plan of 0 tokens carries finished and preempted ids, or nothing at all.
        """
        newcomers_first, budget = False, self._token_budget
        if not self.suspects:
            newcomers_first, budget = self._make_room_for_newcomers(budget)
        step = PlanBuilder(self._next_step_id, budget)
        if self.suspects and budget:
            self._schedule_suspect(step)
        elif newcomers_first:
            self._schedule_newcomers_first(step)
        else:
            self._schedule_running(step, self.running.copy())
            if self.waiting and step.may_start_requests:
                self._schedule_waiting(step)
        total = budget - step.token_budget
        self._burst_tokens = self._burst_tokens + total if newcomers_first else 0
        self._is_short_of_blocks = step.awaits_blocks or step.has_preempted
        plan = step.build(total, self.finished_req_ids, self.preempted_req_ids)
        self._update_after_schedule(plan, step.requests)
        return plan

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Allowed tokens of the newest plan's structured requests; None if there are none.

        The result of the step before must have been processed if the plan says that it has
        ``pending_structured_output_tokens``; who ended with it has no row here.
        """
        if not scheduler_output.has_structured_output_requests:
            return None
        step = self._in_flight[-1]
        assert step.step_id == scheduler_output.step_id, "masks are for the newest plan"
        return grammar_output(scheduler_output, step)

    def _make_room_for_newcomers(self, budget: int) -> tuple[bool, int]:
        """Whether newcomers go first, and the step's token budget; 0 stays 0.

        A crowd, many newcomers compared with those who would wait for them, goes first until the
        last of it is through, or else all would wait twice. Short prompts beside more streams are
        a backlog if they do not fit into the common budget. Every step carries the streams along,
        so where prompts come nearly as fast as they are computed, small steps let the queue grow.
        """
        if not (self.waiting or self._has_chunks):
            return False, budget
        if self._is_short_of_blocks:
            return False, budget  # they would take what a running request waits for, for ever
        newcomers = streams = 0
        for request in self.running:
            if not request.is_prefill_chunk:
                streams += 1
            elif self._is_short(request):
                newcomers += 1
            else:  # it would be first of all, many would wait for one, and it would take all room
                return False, budget
        wanted = len(self.running)
        places = self.max_num_running_reqs - wanted
        for request in itertools.islice(self.waiting, max(0, min(places, MAX_CROWD))):
            if not self._is_short(request):
                break
            newcomers += 1
            wanted += request.num_tokens
        is_crowd = self._burst_tokens < self._max_burst_tokens and newcomers >= (
            1 if self._burst_tokens else max(1, NEWCOMERS_PER_STREAM * streams)
        )
        if budget:
            largest = self.config.largest_step
            limit = self.config.crowd_step_tokens // 2
            budget = largest if is_crowd else max(budget, min(wanted, limit))
        return is_crowd, budget

    def _is_short(self, request: Request) -> bool:
        num_left = request.num_tokens - request.num_computed_tokens
        return num_left <= SHORT_PROMPT_STEPS * self.config.max_num_batched_tokens

    def _schedule_newcomers_first(self, step: PlanBuilder) -> None:
        """Short prompts up to the first long one, then as always with what is left of the budget.

        Many prompts at once are computed in the same time either way. Beside them every stream
        would crawl, token by slow token, for all of it; so it waits once. And the prompts, which
        carry nobody along, are through sooner; in fewer, larger steps (``crowd_step_tokens``) by
        what each of them reads of the weights.
        """
        prefilling: list[Request] = []
        decoding: list[Request] = []
        for request in self.running:
            (prefilling if request.is_prefill_chunk else decoding).append(request)
        self._schedule_running(step, prefilling)
        if self.waiting and step.may_start_requests:
            self._schedule_waiting(step, only_short=True)
        self._schedule_running(step, decoding)
        if self.waiting and step.may_start_requests:
            self._schedule_waiting(step)

    def _schedule_running(self, step: PlanBuilder, running: list[Request]) -> None:
        """Front to back: every running request gets what it needs, while the budget lasts."""
        cap = self._tokens_per_request_cap()
        requests, num_scheduled, req_ids = step.requests, step.num_scheduled_tokens, step.req_ids
        new_block_ids, num_outputs = step.new_block_ids, step.num_output_tokens
        num_computed = step.num_computed_tokens
        for request in running:
            if step.token_budget == 0:
                break
            computed = request.num_computed_tokens
            if computed < request.plain_until:
                request_id = request.request_id
                requests.append(request)
                num_scheduled[request_id] = 1
                req_ids.append(request_id)
                new_block_ids.append(None)
                num_computed.append(computed)
                num_outputs.append(computed + 1 - request.num_prompt_tokens)
                step.token_budget -= 1
            elif request.status is RequestStatus.RUNNING:  # or preempted in this very step
                self._schedule_running_request(request, step, cap)

    def _schedule_running_request(self, request: Request, step: PlanBuilder, cap: int) -> None:
        placeholders = request.num_output_placeholders
        if placeholders and self._surely_ends(request, placeholders):
            return
        num_known = request.num_tokens + placeholders - request.num_computed_tokens
        num_new = num_known
        if request.spec_token_ids:
            num_new = self._with_spec_tokens(request, num_known, step)
        num_new = min(num_new, cap, step.token_budget)
        if num_new <= 0:
            return
        new_ids = self.kv_cache_manager.allocate_slots(request, num_new, step.step_id)
        if new_ids is None and num_new > num_known:
            # Nobody is preempted or waits for the sake of drafts.
            num_new = num_known
            new_ids = self.kv_cache_manager.allocate_slots(request, num_new, step.step_id)
        if new_ids is None:
            if step.new_requests:
                step.awaits_blocks = True
                return  # it waits a step: nobody is started and sent away in the same one
            new_ids = self._preempt_for(request, num_new, step)
            if new_ids is None:
                return
        step.add_running(request, num_new, new_ids)
        if request.use_structured_output:
            step.has_structured_requests = True
            step.awaits_grammar_tokens |= placeholders > 0
        if request.spec_token_ids:
            self._schedule_spec_tokens(request, num_new, step)

    def _schedule_waiting(self, step: PlanBuilder, *, only_short: bool = False) -> None:
        """Start waiting requests in queue order; the first one that does not fit ends the pass.

        With ``only_short`` the first long prompt does, too.
        """
        cap = self._tokens_per_request_cap()
        skipped: list[Request] = []
        while (
            self.waiting and step.token_budget > 0 and len(self.running) < self.max_num_running_reqs
        ):
            request = self.waiting.peek_request()
            if only_short and not self._is_short(request):
                break
            if self._cannot_start_yet(request):
                skipped.append(self.waiting.pop_request())
                continue
            if request.grammar_future is not None and not self._take_grammar(request):
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
        if self._try_start(request, step, cap):
            self.waiting.remove_request(request)
            return
        # A cache reset took its blocks away in the middle of a step: they come back with that.
        assert self._in_flight, "the whole pool is free, and admission checked that it is enough"

    def _tokens_per_request_cap(self) -> int:
        """Most tokens one request may take in a step; while it is alone, all of them."""
        threshold = self.config.long_prefill_token_threshold
        if threshold > 0 and len(self.running) + len(self.waiting) > 1:
            return threshold
        return self.config.largest_step

    def _surely_ends(self, request: Request, placeholders: int) -> bool:
        """Whether the tokens on their way surely reach the length limit.

        A draft may be refused, so only one token is certain then.
        """
        certain = 1 if self.num_spec_tokens else placeholders
        return request.num_tokens + certain >= request.max_total_tokens

    def _cannot_start_yet(self, request: Request) -> bool:
        if request.grammar_future is not None and not request.grammar_future.done():
            return True
        if self.pause_state is PauseState.PAUSED_NEW and not request.has_been_scheduled:
            return True
        # Tokens made before a preemption are still to come, and belong to the prompt by then.
        return self._is_in_flight(request)

    def _is_in_flight(self, request: Request) -> bool:
        return request.last_step_id > self.kv_cache_manager.last_processed_step

    def _take_grammar(self, request: Request) -> bool:
        """The grammar is compiled: the request may start. False if that failed: it has ended."""
        assert request.grammar_future is not None
        try:
            request.grammar = request.grammar_future.result()
            request.grammar_future = None
        except Exception as error:
            reason = f"the grammar could not be compiled: {error}"
            self._news.append((request.client_index, self._fail(request, reason)))
            return False
        request.status = RequestStatus.WAITING
        return True

    def _try_start(self, request: Request, step: PlanBuilder, cap: int) -> bool:
        """Give a waiting request its blocks and its first tokens. False if it does not fit.

        The caller takes it out of the queue.
        """
        kv = self.kv_cache_manager
        hit_blocks, num_hit = kv.get_computed_blocks(request)
        num_new = request.num_tokens - num_hit
        if self.config.enable_chunked_prefill:
            num_new = min(num_new, cap, step.token_budget)
        elif num_new > step.token_budget:
            return False
        if not kv.allocate_first_slots(
            request,
            num_hit + num_new,
            step.step_id,
            hit_blocks,
            full_sequence_must_fit=self.config.full_sequence_must_fit,
            reserve=kv.watermark_blocks if self.running else 0,
        ):
            return False
        request.num_computed_tokens = num_hit
        if not request.has_been_scheduled:
            request.has_been_scheduled = True
            self._note_prefix_hits(request, num_hit)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        num_cached = len(hit_blocks) * kv.block_size
        step.add_new(request, num_new, kv.get_block_ids(request.request_id), num_cached)
        step.has_structured_requests |= request.use_structured_output
        return True

    def _note_prefix_hits(self, request: Request, num_hit: int) -> None:
        """Told once for each request: a resumption would only find its own blocks again."""
        request.prefill_stats = PrefillStats(
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=num_hit,
            queued_ts=request.queued_ts,
            scheduled_ts=self._clock.monotonic(),
        )
        self._stats.count_lookup(request.num_tokens, num_hit)

    def _with_spec_tokens(self, request: Request, num_new: int, step: PlanBuilder) -> int:
        """Drafts on top, but no further than the longest sequence allows, and only as many as
        leave a token to everybody behind."""
        room = self.max_seq_tokens - 1 - request.num_computed_tokens
        num_behind = len(self.running) - len(step.requests) - 1
        spare = max(0, step.token_budget - num_new - num_behind)
        return min(num_new + min(len(request.spec_token_ids), spare), room)

    def _schedule_spec_tokens(self, request: Request, num_new: int, step: PlanBuilder) -> None:
        known = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        if num_new > known:
            step.spec_tokens[request.request_id] = request.spec_token_ids[: num_new - known]
        request.spec_token_ids = []

    def _update_after_schedule(self, plan: SchedulerOutput, requests: list[Request]) -> None:
        """The plan is made: advance the counters as if it had run."""
        step_id = plan.step_id
        chunks: set[str] = set()
        for request, num_scheduled in zip(
            requests, plan.num_scheduled_tokens.values(), strict=True
        ):
            request.last_step_id = step_id
            request.num_computed_tokens = computed = request.num_computed_tokens + num_scheduled
            if computed <= request.plain_until:
                continue
            request.is_prefill_chunk = (
                computed < request.num_tokens + request.num_output_placeholders
            )
            if request.is_prefill_chunk:
                chunks.add(request.request_id)
            elif not self.num_spec_tokens and not request.use_structured_output:
                slots = self.kv_cache_manager.num_slots(request.request_id)
                request.plain_until = min(slots, request.max_total_tokens - 1)
        self._has_chunks = bool(chunks)
        if requests:
            self._in_flight.append(StepInFlight(step_id, requests, chunks))
        self._next_step_id = step_id + 1
        if plan.finished_req_ids:
            self.finished_req_ids = set()
        if plan.preempted_req_ids:
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
        """The least important running request of those whose blocks are not all shared."""
        candidates: Iterable[Request] = reversed(self.running)
        if self.config.policy == "priority":
            candidates = sorted(self.running, key=lambda request: request.sort_key, reverse=True)
        least = None
        for request in candidates:
            least = least or request
            if self.kv_cache_manager.gives_blocks_back(request):
                return request
        assert least is not None
        return least

    # ---------------------------------------------------------------- the results

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the result of the oldest step in flight; returns news by client index."""
        self.kv_cache_manager.step_processed(scheduler_output.step_id)
        news: dict[int, list[EngineCoreOutput]] = {}
        if not scheduler_output.num_scheduled_tokens:
            return self._make_outputs(news)
        step = self._in_flight.popleft()
        assert step.step_id == scheduler_output.step_id, "results come in step order"
        rows = _rows_in_plan_order(scheduler_output, model_runner_output)
        may_be_plain = not (self.suspects or model_runner_output.failed_req_ids)
        client_index = -1
        for request, token_ids in zip(step.requests, rows, strict=True):
            if request is None:
                continue
            output: EngineCoreOutput | None
            if may_be_plain and request.has_plain_output and token_ids and len(token_ids) == 1:
                token_id = token_ids[0]
                request.all_token_ids.append(token_id)
                request.num_tokens = num_tokens = request.num_tokens + 1
                if request.num_output_placeholders:
                    request.num_output_placeholders -= 1
                if token_id in request.end_token_ids or num_tokens >= request.max_total_tokens:
                    output = self._end_with_token(request, token_ids)
                else:
                    output = EngineCoreOutput(
                        request_id=request.request_id, new_token_ids=token_ids
                    )
            else:
                output = self._update_request(
                    request, token_ids, step, scheduler_output, model_runner_output
                )
                if output is None:
                    continue
            if request.client_index != client_index:
                client_index = request.client_index
                outputs = news.setdefault(client_index, [])
            outputs.append(output)
        if model_runner_output.draft_token_ids:
            self._take_drafts(model_runner_output.draft_token_ids)
        return self._make_outputs(news)

    def _end_with_token(self, request: Request, token_ids: list[int]) -> EngineCoreOutput:
        """The one token that a plain decode has just appended is its last one."""
        end = check_stop(request, token_ids[0])
        assert end is not None
        self._finish(request, end)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=token_ids,
            finish_reason=end.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _update_request(
        self,
        request: Request,
        token_ids: list[int] | None,
        step: StepInFlight,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        """One row of a result: keep its tokens, end the request if it is done."""
        request_id = request.request_id
        if request.status.is_finished:
            return None
        failure = model_runner_output.failed_req_ids.get(request_id)
        if failure is None and not token_ids and request_id not in step.chunks:
            failure = _NO_REPLY  # the token would never be asked for again
        if failure is not None or token_ids is None:
            return self._fail(request, failure or _NO_REPLY)
        if model_runner_output.prompt_logprobs:
            self._collect_prompt_logprobs(request, scheduler_output, model_runner_output)
        if not token_ids:
            return None
        if scheduler_output.scheduled_spec_decode_tokens:
            self._roll_back_refused_drafts(request, len(token_ids), scheduler_output)
        kept = self._update_request_with_output(request, token_ids)
        if self.suspects:
            self.suspects.pop(request_id, None)
        if kept is None:
            return self._fail(request, f"the grammar does not allow the tokens {token_ids}")
        token_ids, end = kept
        if end is not None:
            self._finish(request, end)
        logprobs = model_runner_output.logprobs.get(request_id)
        request.has_plain_output = (
            end is None
            and request.status is RequestStatus.RUNNING
            and logprobs is None
            and not request.num_preemptions
            and not request.use_structured_output
            and not self.num_spec_tokens
            and request.sampling_params.repetition_detection is None
        )
        return EngineCoreOutput(
            request_id=request_id,
            new_token_ids=token_ids,
            new_logprobs=None if logprobs is None else logprobs[: len(token_ids)],
            new_prompt_logprobs=request.take_prompt_logprobs(),
            finish_reason=None if end is None else end.finish_reason,
            stop_reason=request.stop_reason,
            ends_with_text=(
                end is RequestStatus.FINISHED_STOPPED and token_ids[-1] not in request.end_token_ids
            ),
            prefill_stats=request.take_prefill_stats(),
            num_preemptions=request.num_preemptions,
            pooled=model_runner_output.pooled.get(request_id),
        )

    def _update_request_with_output(
        self, request: Request, token_ids: list[int]
    ) -> tuple[list[int], RequestStatus | None] | None:
        """Append tokens up to the first stop; returns those kept, and how they end the request.

        None if its grammar does not allow one of them. A preempted request has no placeholders
        any more, but its tokens still arrive.
        """
        end: RequestStatus | None = None
        grammar = request.grammar
        for index, token_id in enumerate(token_ids, start=1):
            if grammar is not None and not grammar.accept_tokens([token_id]):
                return None
            request.all_token_ids.append(token_id)
            request.num_tokens += 1
            end = check_stop(request, token_id)
            if end is not None:
                token_ids = token_ids[:index]
                break
        if request.num_output_placeholders:
            request.num_output_placeholders -= len(token_ids)
        return token_ids, end

    def _roll_back_refused_drafts(
        self, request: Request, num_tokens: int, scheduler_output: SchedulerOutput
    ) -> None:
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(request.request_id)
        if not drafts:
            return
        refused = len(drafts) + 1 - num_tokens
        self._stats.count_drafts(len(drafts), num_tokens - 1)
        if request.status is not RequestStatus.RUNNING:
            return  # a preempted request starts from 0 anyway
        request.num_computed_tokens -= refused
        if request.num_output_placeholders:
            request.num_output_placeholders -= refused

    def _take_drafts(self, draft_token_ids: dict[str, list[int]]) -> None:
        """Drafts that follow the tokens just processed.

        Those of unknown requests and of unfinished prefills are ignored; a grammar cuts its
        request's off at the first one that it does not allow.
        """
        for request_id, token_ids in draft_token_ids.items():
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            if request.is_prefill_chunk:
                continue
            if request.grammar is not None:
                token_ids = request.grammar.validate_tokens(token_ids)
            request.spec_token_ids = token_ids[: self.num_spec_tokens]

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

    # ---------------------------------------------------------------- failure

    def fail_steps(
        self, plans: Sequence[SchedulerOutput], reason: str, *, find_culprit: bool = True
    ) -> dict[int, EngineCoreOutputs]:
        """The first of these plans failed; the others, planned on top of it, are void with it.

        Every running request loses its KV and is computed again, which changes no token. If
        one request was alone in the failed plan, it is the culprit and ends with ``reason``.
        Otherwise (unless ``find_culprit`` is False) those of the plan that are still there run one
        by one until the culprit fails alone. The device is idle when this is called.
        """
        failed = plans[0]
        members: list[Request] = []
        if self._in_flight and self._in_flight[0].step_id == failed.step_id:
            members = [
                request
                for request in self._in_flight[0].requests
                if request is not None and not request.status.is_finished
            ]
        self._in_flight.clear()
        self.kv_cache_manager.withdraw_since(failed.step_id)
        self.kv_cache_manager.step_processed(plans[-1].step_id)
        for request in reversed(self.running.copy()):
            self._preempt(request, drop_stale=True)
        for plan in plans:
            # Nobody knows how far the runner got; it ignores ids that it has no row for.
            self.finished_req_ids |= plan.finished_req_ids
            self.preempted_req_ids |= plan.preempted_req_ids
        news: dict[int, list[EngineCoreOutput]] = {}
        if find_culprit and members and len(failed.num_scheduled_tokens) == 1:
            news[members[0].client_index] = [self._fail(members[0], reason)]
        elif find_culprit:
            self.suspects.update(dict.fromkeys(request.request_id for request in members))
        return self._make_outputs(news)


def _rows_in_plan_order(
    plan: SchedulerOutput, output: ModelRunnerOutput
) -> Sequence[list[int] | None]:
    """The sampled tokens of each planned request; None where the executor said nothing."""
    req_ids = list(plan.num_scheduled_tokens)
    if output.req_ids == req_ids:
        return output.sampled_token_ids
    by_id = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    return [by_id.get(request_id) for request_id in req_ids]
