"""Who is where: every request from its arrival to its end, and the ways between.

``Scheduler`` decides; this is what it decides about. A request is in ``requests`` until it ends,
and in exactly one of ``running`` and ``waiting``.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.clock import Clock
from twostep.contracts.grammar import GrammarFuture
from twostep.contracts.outputs import EngineCoreOutput, EngineCoreOutputs
from twostep.contracts.request import EngineCoreRequest
from twostep.kv_cache.kv_cache_manager import KVCacheManager
from twostep.scheduler.config_check import check_config
from twostep.scheduler.queues import make_request_queue
from twostep.scheduler.request import Request, RequestStatus
from twostep.scheduler.stats import StatsCounter
from twostep.scheduler.step_in_flight import StepInFlight


class PauseState(enum.Enum):
    """What may be planned."""

    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()
    """Only requests that were started already."""
    PAUSED_ALL = enum.auto()
    """Nothing."""


class SchedulerState:
    """Requests, queues and counters of a scheduler; every change of a request's status."""

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
            max_in_flight_tokens=self.num_steps_in_flight * scheduler_config.largest_step,
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
        self.pause_state = PauseState.UNPAUSED
        self._token_budget = scheduler_config.max_num_batched_tokens
        """Of each step; 0 while everything is paused."""
        self._clock = clock
        # Priorities say who goes first; then numbers do not.
        self._max_burst_tokens = (
            scheduler_config.prefill_burst_tokens if scheduler_config.policy == "fcfs" else 0
        )
        self._burst_tokens = 0
        """Of the steps in a row in which newcomers went first."""
        self._has_chunks = False
        """Whether the last plan left prompts unfinished."""
        self._is_short_of_blocks = False
        """Whether a running request had too few in the last plan."""
        self._next_step_id = 0
        self._in_flight: deque[StepInFlight] = deque()
        """Steps whose results are still to come, the oldest first."""
        self._news: list[tuple[int, EngineCoreOutput]] = []
        """(client, output) of requests that ended outside of a step."""
        self._stats = StatsCounter()

    # ---------------------------------------------------------------- requests come and go

    def make_request(
        self, request: EngineCoreRequest, grammar_future: GrammarFuture | None = None
    ) -> Request:
        """The scheduler's record of a request, its prompt hashed."""
        record = Request(
            request,
            max_seq_tokens=self.max_seq_tokens,
            queued_ts=self._clock.monotonic(),
            grammar_future=grammar_future,
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
        """Whether there is something to plan, or news that somebody has not been told."""
        if self.finished_req_ids or self.preempted_req_ids or self._news:
            return True
        if self.pause_state is PauseState.UNPAUSED:
            return bool(self.requests)
        return self.pause_state is PauseState.PAUSED_NEW and self.has_started_requests()

    def has_started_requests(self) -> bool:
        """Whether some request that has been scheduled has not ended."""
        return any(request.has_been_scheduled for request in self.requests.values())

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached content, for instance after the weights changed.

        False, and nothing happens, while requests hold blocks. ``reset_running_requests``
        preempts those first, and throws away what is still in flight of them.
        """
        if reset_running_requests:
            for request in reversed(self.running.copy()):
                self._preempt(request, drop_stale=True)
        return self.kv_cache_manager.reset_prefix_cache()

    # ---------------------------------------------------------------- pause and resume

    def pause(self, state: PauseState) -> None:
        """Change what may be planned; ``UNPAUSED`` resumes. Counters stay as they are."""
        self.pause_state = state
        is_paused = state is PauseState.PAUSED_ALL
        self._token_budget = 0 if is_paused else self.config.max_num_batched_tokens

    def abort_all(self) -> None:
        """End every request, and tell their clients."""
        for request in list(self.requests.values()):
            self._finish(request, RequestStatus.FINISHED_ABORTED)
            self._news.append((request.client_index, self._last_output(request)))

    # ---------------------------------------------------------------- ways back and out

    def _preempt(self, request: Request, *, drop_stale: bool = False) -> None:
        """Take row and blocks from a running request; it waits at the front with all its tokens.

        Tokens of steps in flight are still delivered, unless ``drop_stale``.
        """
        self.running.remove(request)
        self.kv_cache_manager.free(request, publish=not drop_stale)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.plain_until = 0
        request.has_plain_output = False
        request.spec_token_ids = []
        request.num_preemptions += 1
        if drop_stale:
            for step in self._in_flight:
                step.drop(request)
            request.last_step_id = -1
        self.waiting.prepend_request(request)
        self.preempted_req_ids.add(request.request_id)
        self._stats.num_preemptions += 1

    def _finish(self, request: Request, status: RequestStatus, *, publish: bool = True) -> None:
        """Take a request out of everything; the next plan tells the executor."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove_request(request)
        request.status = status
        request.has_plain_output = False
        self.kv_cache_manager.free(request, publish=publish)
        del self.requests[request.request_id]
        if request.has_been_scheduled:
            self.finished_req_ids.add(request.request_id)
        self.suspects.pop(request.request_id, None)

    def _fail(self, request: Request, reason: str) -> EngineCoreOutput:
        """End one request with an error; nobody will find its KV again."""
        self.kv_cache_manager.withdraw(request)
        self._finish(request, RequestStatus.FINISHED_ERROR, publish=False)
        request.stop_reason = reason
        return self._last_output(request)

    @staticmethod
    def _last_output(request: Request) -> EngineCoreOutput:
        """The end of a request that brings no more tokens."""
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            prefill_stats=request.take_prefill_stats(),
            num_preemptions=request.num_preemptions,
        )

    # ---------------------------------------------------------------- news

    def _make_outputs(
        self, news: dict[int, list[EngineCoreOutput]]
    ) -> dict[int, EngineCoreOutputs]:
        """One message for each client; statistics and KV events go to one of them."""
        if self._news:
            for client_index, output in self._news:
                news.setdefault(client_index, []).append(output)
            self._news = []
        kv = self.kv_cache_manager
        stats = self._stats.take(len(self.running), len(self.waiting), kv.pool.usage)
        kv_events = kv.take_events()
        timestamp = self._clock.monotonic()
        outputs: dict[int, EngineCoreOutputs] = {}
        for client_index in news or (0,):
            outputs[client_index] = EngineCoreOutputs(
                outputs=news.get(client_index, []),
                scheduler_stats=None if outputs else stats,
                timestamp=timestamp,
                kv_events=None if outputs else kv_events,
            )
        return outputs

    def take_news(self) -> dict[int, EngineCoreOutputs] | None:
        """News that need not wait for a step; None if there are none."""
        return self._make_outputs({}) if self._news else None
