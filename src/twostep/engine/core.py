"""The engine core: plans steps, queues them on the executor, takes results, sends news.

With asynchronous scheduling one call of ``step_with_batch_queue`` plans and queues step k, then
finishes step k-1. The only wait is for the result of the oldest step. A step that fails takes
nobody with it but its culprit: see ``_recover``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

import msgspec

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.clock import Clock
from twostep.contracts.errors import EngineDeadError
from twostep.contracts.executor import Executor, StepFuture
from twostep.contracts.grammar import GrammarCompiler
from twostep.contracts.observer import CoreMethod, StepObserver
from twostep.contracts.outputs import EngineCoreOutputs, ModelRunnerOutput
from twostep.contracts.pause import PauseMode
from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.engine.admission import check_admission
from twostep.engine.step_dump import describe_step
from twostep.scheduler.async_scheduler import AsyncScheduler
from twostep.scheduler.request import RequestStatus, end_token_ids
from twostep.scheduler.scheduler import Scheduler
from twostep.scheduler.state import PauseState

logger = logging.getLogger(__name__)

ClientOutputs = dict[int, EngineCoreOutputs]
"""News by client index."""


class FailedStep(msgspec.Struct, frozen=True):
    """Stands for the result of a step that could not be queued, or whose error was told already."""

    error: BaseException


class Unsampled:
    """Stands for the result of a step whose forward pass is queued and whose sampling is not.

    A grammar needs a token of the step before to say what it allows. Sampling is queued by the call
    that follows that step's result, first of all: while the forward pass runs.
    """


class EngineCore:
    """Owns the scheduler and drives the executor. One thread calls ``step_fn`` in a loop."""

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        executor: Executor,
        clock: Clock,
        num_spec_tokens: int = 0,
        grammar_compiler: GrammarCompiler | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        """The executor is running already; the core shuts it down in ``shutdown``.

        Without a ``grammar_compiler``, requests for structured output are refused.
        """
        self.executor = executor
        self.observer = observer
        is_async = scheduler_config.async_scheduling and executor.max_concurrent_batches > 1
        scheduler_class = AsyncScheduler if is_async else Scheduler
        self.scheduler = scheduler_class(
            scheduler_config, cache_config, clock, num_spec_tokens=num_spec_tokens
        )
        self.batch_queue_size = min(
            executor.max_concurrent_batches, scheduler_class.num_steps_in_flight
        )
        self.batch_queue: deque[tuple[StepFuture | FailedStep | Unsampled, SchedulerOutput]]
        """Steps in flight, the oldest at the right end."""
        self.batch_queue = deque()
        self.aborts_queue: SimpleQueue[list[str]] = SimpleQueue()
        """Aborts from another thread; seen before the next result is processed."""
        self._is_async = is_async
        self._grammar_compiler = grammar_compiler
        self._dead: str | None = None

    # ---------------------------------------------------------------- requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises InvalidRequestError if it can never be served."""
        self._check_alive()
        compiler = self._grammar_compiler
        check_admission(request, self.scheduler, can_structure=compiler is not None)
        grammar_future = None
        structured_outputs = request.sampling_params.structured_outputs
        if structured_outputs is not None:
            assert compiler is not None
            grammar_future = compiler.compile(structured_outputs, end_token_ids(request))
        self.scheduler.add_request(self.scheduler.make_request(request, grammar_future))
        self._tell("add_request", request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without further news; unknown and finished ids are ignored."""
        ids = list(request_ids)
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        self._tell("abort_requests", ids)

    def has_unfinished_requests(self) -> bool:
        """Whether some request still expects news."""
        return self.scheduler.has_unfinished_requests()

    def has_work(self) -> bool:
        """Whether ``step_fn`` has something to do: plan, tell the executor, or take a result."""
        return self.scheduler.has_requests() or bool(self.batch_queue)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached content; see Scheduler.reset_prefix_cache."""
        done = self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)
        self._tell("reset_prefix_cache", reset_running_requests)
        return done

    def pause(self, mode: PauseMode) -> None:
        """Stop planning, until ``resume``.

        ``abort`` ends every request now and tells its client; ``wait`` lets those go on that were
        started; ``keep`` leaves everybody where they are. Steps in flight are still processed.
        New requests may be added; they wait.
        """
        if mode == "abort":
            self.scheduler.abort_all()
        is_keep = mode == "keep"
        self.scheduler.pause(PauseState.PAUSED_ALL if is_keep else PauseState.PAUSED_NEW)
        self._tell("pause", mode)

    def resume(self) -> None:
        """Plan again, from the counters that ``pause`` found."""
        self.scheduler.pause(PauseState.UNPAUSED)
        self._tell("resume")

    def _tell(self, method: CoreMethod, *args: object) -> None:
        if self.observer is not None:
            self.observer.called(method, args)

    # ---------------------------------------------------------------- one step

    @property
    def step_fn(self) -> Callable[[], tuple[ClientOutputs | None, bool]]:
        """The step function of this mode. Not stored: a bound method would keep the core alive."""
        return self.step_with_batch_queue if self._is_async else self.step

    def step(self) -> tuple[ClientOutputs | None, bool]:
        """Plan a step, run it, wait for it, process it.

        Returns the news by client and whether tokens were planned.
        """
        self._start_step()
        executed = False
        # A wait that was interrupted has left its step in the queue.
        if not self.batch_queue:
            executed = self._plan_and_launch()
        outputs = self._finish_oldest_step()
        self._end_step(executed)
        return outputs, executed

    def step_with_batch_queue(self) -> tuple[ClientOutputs | None, bool]:
        """Plan and queue step k, then finish step k-1 if the queue is full.

        Filling the queue comes before collecting results: returns None when nothing was
        finished. The flag tells whether tokens were planned.
        """
        self._start_step()
        executed = False
        self._sample_if_due()
        if len(self.batch_queue) < self.batch_queue_size and not self._newest_launch_failed():
            executed = self._plan_and_launch()
            if executed and len(self.batch_queue) < self.batch_queue_size:
                self._end_step(executed)
                return None, True
        outputs = self._finish_oldest_step()
        self._end_step(executed)
        return outputs, executed

    def _start_step(self) -> None:
        self._check_alive()
        if self.observer is not None:
            self.observer.step_started()

    def _end_step(self, executed: bool) -> None:
        if self.observer is not None:
            self.observer.step_finished(executed)

    def _plan_and_launch(self) -> bool:
        """Queue the next plan, if there is anything in it; True if it has tokens."""
        if not self.scheduler.has_requests():
            return False
        plan = self.scheduler.schedule()
        if self.observer is not None:
            self.observer.scheduled(plan)
        has_tokens = plan.total_num_scheduled_tokens > 0
        if has_tokens or plan.finished_req_ids or plan.preempted_req_ids:
            self._launch(plan)
        return has_tokens

    def _launch(self, plan: SchedulerOutput) -> None:
        """Queue forward pass and sampling on the executor, without waiting.

        An error waits in the queue for its turn. An interrupt is raised, but the plan is not lost.
        """
        future: StepFuture | FailedStep | Unsampled | None
        interrupt = None
        try:
            future = self.executor.execute_model(plan)
            if self.observer is not None:
                self.observer.launched(plan)
            if future is None:
                awaits_tokens = plan.pending_structured_output_tokens
                future = Unsampled() if awaits_tokens else self._launch_sampling(plan)
        except BaseException as error:
            future, interrupt = self._note_failed_launch(error)
        self.batch_queue.appendleft((future, plan))
        if interrupt is not None:
            raise interrupt

    def _launch_sampling(self, plan: SchedulerOutput) -> StepFuture:
        grammar_output = self.scheduler.get_grammar_bitmask(plan)
        future = self.executor.sample_tokens(grammar_output)
        if self.observer is not None:
            self.observer.sampling_launched(plan, grammar_output)
        return future

    def _sample_if_due(self) -> None:
        """Queue the sampling of the only step in flight, if it waited for the one before it."""
        if len(self.batch_queue) != 1 or not isinstance(self.batch_queue[0][0], Unsampled):
            return
        plan = self.batch_queue[0][1]
        future: StepFuture | FailedStep
        interrupt = None
        try:
            future = self._launch_sampling(plan)
        except BaseException as error:
            future, interrupt = self._note_failed_launch(error)
        self.batch_queue[0] = (future, plan)
        if interrupt is not None:
            raise interrupt

    def _note_failed_launch(self, error: BaseException) -> tuple[FailedStep, BaseException | None]:
        """What stands in the queue for the step, and what to raise, if it is an interrupt."""
        self.executor.reset_after_failure()
        return FailedStep(error), None if isinstance(error, Exception) else error

    def _newest_launch_failed(self) -> bool:
        """Whether the last plan could not be queued: nothing may be planned on top of it."""
        return bool(self.batch_queue) and isinstance(self.batch_queue[0][0], FailedStep)

    def _finish_oldest_step(self) -> ClientOutputs | None:
        """Wait for the oldest step and process its result.

        If nothing is in flight: news of requests that ended without a step, or None.
        """
        if not self.batch_queue:
            return self.scheduler.take_news()
        future, plan = self.batch_queue[-1]
        if self.observer is not None:
            self.observer.waiting(plan)
        if isinstance(future, FailedStep):
            outputs = self._recover(future.error)
        else:
            assert not isinstance(future, Unsampled), "it is sampled before anything else"
            try:
                output = future.result()
            except Exception as error:
                outputs = self._recover(error)
            else:
                outputs = self._process_result(plan, output)
        if self.observer is not None:
            self.observer.updated(plan, outputs)
        return outputs

    def _process_result(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> ClientOutputs:
        self.batch_queue.pop()
        if self.observer is not None:
            self.observer.result_arrived(plan, output)
        self._process_aborts_queue()
        return self.scheduler.update_from_output(plan, output)

    def _process_aborts_queue(self) -> None:
        while not self.aborts_queue.empty():
            self.abort_requests(self.aborts_queue.get_nowait())

    # ---------------------------------------------------------------- failure and end

    def _recover(self, error: BaseException) -> ClientOutputs:
        """The oldest step failed: void what was planned on top of it, find the culprit.

        Raises EngineDeadError if the step had no request that could be the culprit.
        """
        plans = [plan for _, plan in reversed(self.batch_queue)]
        is_interrupt = not isinstance(error, Exception)
        if not is_interrupt:
            logger.error("%s", describe_step(plans[0], self.scheduler), exc_info=error)
        # A device tells an error once: keep it, should this wait be interrupted.
        self.batch_queue[-1] = (FailedStep(error), plans[0])
        for future, _ in self.batch_queue:
            if isinstance(future, Unsampled):
                self.executor.reset_after_failure()
            elif not isinstance(future, FailedStep):
                _wait_until_idle(future)
        self.batch_queue.clear()
        reason = f"{type(error).__name__}: {error}"
        if self.observer is not None:
            self.observer.step_failed(plans, reason, not is_interrupt)
        if not plans[0].num_scheduled_tokens and not is_interrupt:
            self._dead = reason
            self._check_alive()
        return self.scheduler.fail_steps(plans, reason, find_culprit=not is_interrupt)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(
                f"the engine core stopped ({self._dead}): restart it; the log has the details"
            )

    def shutdown(self) -> None:
        """Drop all requests and free the device. Safe to call twice."""
        self.abort_requests(list(self.scheduler.requests))
        self.executor.shutdown()


def _wait_until_idle(future: StepFuture) -> None:
    """The result is void; only the device has to be done with it."""
    try:
        future.result()
    except Exception as error:
        logger.debug("a later step failed as well: %s", error)
