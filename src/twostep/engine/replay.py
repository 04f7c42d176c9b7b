"""Runs a recording again: the recorded calls and results in, the same plans out.

The core is the real one; its executor answers with what was recorded. The replay watches the core
as the recorder did and compares each stop with the recorded one; plans byte for byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from twostep.contracts.errors import EngineDeadError, InvalidRequestError, TwostepError
from twostep.contracts.executor import StepFuture
from twostep.contracts.observer import CoreMethod, StepObserver
from twostep.contracts.outputs import EngineCoreOutputs, ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.engine.core import EngineCore
from twostep.engine.recorded_grammars import GrammarNews, ReplayedCompiler
from twostep.engine.recording import (
    AnyEvent,
    Arrived,
    Called,
    Event,
    Failed,
    Finished,
    GrammarSaid,
    Launched,
    Planned,
    Recording,
    SamplingLaunched,
    Started,
    Updated,
    Waiting,
    decode_plan,
    encode_plan,
)

E = TypeVar("E", bound=Event)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where the replay first left the recording."""

    step: int
    field: str
    """Of the plan, with indexes; or the name of the stop."""
    recorded: str
    replayed: str
    recorded_plan: SchedulerOutput | None = None
    replayed_plan: SchedulerOutput | None = None

    def __str__(self) -> str:
        return f"step {self.step}, {self.field}: recorded {self.recorded}, now {self.replayed}"


class RecordedFailure(Exception):
    """A step failed in the recording, so it fails again."""


class _RecordedInterrupt(BaseException):
    """The recorded program was interrupted, or killed, at this point."""


class _Stop(BaseException):
    """Ends the replay from inside the core, past its handling of failures."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


class ReplayClock:
    """Shows the recorded time of the event that is being replayed."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Seconds, the recorded core's clock."""
        return self.now


class Replay:
    """One run of a recording; at once the core's executor and its observer.

    Unlike other observers it raises: a difference ends the replay.
    """

    def __init__(
        self,
        recording: Recording,
        clock: ReplayClock,
        watcher: StepObserver | None = None,
    ) -> None:
        """``watcher`` is told of every stop that agreed, with the clock at the recorded time."""
        header = recording.header
        self.max_concurrent_batches = header.max_concurrent_batches
        self.step_id = -1
        """The last plan that agreed."""
        self.num_requests = 0
        self._recording = recording
        self._clock = clock
        self._watcher = watcher
        self._expected: deque[AnyEvent] = deque()
        """What is left of the recorded call of the step function."""
        self._plan: SchedulerOutput | None = None
        self._core = EngineCore(
            scheduler_config=header.scheduler_config,
            cache_config=header.cache_config,
            executor=self,
            clock=clock,
            num_spec_tokens=header.num_spec_tokens,
            grammar_compiler=ReplayedCompiler(self),
            observer=self,
        )

    def run(self, until: int | None = None) -> Difference | None:
        """Replay everything, or up to the call that plans step ``until``.

        Returns the first difference, or None.

        Raises:
            RecordingError: The file is damaged.
            TwostepError: The core itself fails, as it may have done when this was recorded.
        """
        try:
            for call in _calls(self._recording):
                self._clock.now = call[0].time
                if isinstance(call[0], Called):
                    self._apply(call[0])
                else:
                    self._run_step(call)
                if until is not None and self.step_id >= until:
                    break
        except _Stop as stop:
            return stop.difference
        return None

    def _run_step(self, events: list[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, Called):  # an abort that came while the core waited
                self._core.aborts_queue.put(_arguments(event)[0])
        self._expected = deque(events)
        try:
            self._core.step_fn()
        except (_RecordedInterrupt, EngineDeadError):
            pass
        except OSError:
            raise  # the watcher's: nobody reads what it prints
        except Exception as error:
            raise TwostepError(
                f"the core fails after step {self.step_id} with {type(error).__name__}: {error} "
                "(TWOSTEP_DEBUG=1 shows where)"
            ) from error
        if self._expected:
            self._differ("stop", _name(self._expected[0]), "nothing more")

    def _apply(self, call: Called) -> None:
        """Call the core as it was called then."""
        self._expected = deque([call])
        args = _arguments(call)
        core = self._core
        try:
            match call.method:
                case "reset_prefix_cache":
                    core.reset_prefix_cache(reset_running_requests=args[0])
                case "add_request":
                    core.add_request(args[0])
                    self.num_requests += 1
                case "abort_requests":
                    core.abort_requests(args[0])
                case _:
                    getattr(core, call.method)(*args)
        except InvalidRequestError as error:
            self._differ(call.method, "accepted", f"refused: {error}")

    # ---------------------------------------------------------------- comparing

    def _take(self, kind: type[E]) -> E:
        """The next recorded event, which has to be of this kind."""
        if not self._expected:
            raise _RecordedInterrupt
        event = self._expected[0]
        if not isinstance(event, kind):
            self._differ("stop", _name(event), kind.__name__.lower())
        self._expected.popleft()
        self._clock.now = event.time
        return event

    def _next_is(self, kind: type[Event]) -> bool:
        """Whether the recorded run went on to this; raises what stopped it otherwise."""
        if not self._expected:
            raise _RecordedInterrupt
        return isinstance(self._expected[0], kind)

    def _differ(self, field: str, recorded: str, replayed: str) -> NoReturn:
        raise _Stop(
            Difference(step=self.step_id, field=field, recorded=recorded, replayed=replayed)
        )

    def _check_step(self, event: Waiting | Arrived | Failed | Updated, step_id: int) -> None:
        if event.step_id != step_id:
            self._differ(f"{_name(event)} for step", str(event.step_id), str(step_id))

    # ---------------------------------------------------------------- the grammars

    def grammar_news(
        self, number: int, news: GrammarNews, length: int | None = None
    ) -> tuple[int | str | None] | None:
        """See ``GrammarMemory``."""
        if not self._expected:
            return None
        event = self._expected[0]
        if not isinstance(event, GrammarSaid) or (event.number, event.news) != (number, news):
            return None
        if length is not None and event.detail != length:
            return None
        return (self._take(GrammarSaid).detail,)

    # ---------------------------------------------------------------- the executor

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture | None:
        """Queued, failed or interrupted, as it was then."""
        if not self._next_is(Launched):
            raise RecordedFailure("the forward pass could not be queued")
        self._plan = scheduler_output
        if scheduler_output.total_num_scheduled_tokens == 0:
            return _RecordedResult(self, scheduler_output.step_id)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Queued, failed or interrupted, as it was then."""
        assert self._plan is not None
        if not self._next_is(SamplingLaunched):
            raise RecordedFailure("sampling could not be queued")
        return _RecordedResult(self, self._plan.step_id)

    def result_of(self, step_id: int) -> ModelRunnerOutput:
        """The recorded result; raises if the step failed then."""
        if not self._expected:
            raise _RecordedInterrupt
        event = self._expected[0]
        if isinstance(event, Arrived) and event.step_id == step_id:
            return event.output
        if isinstance(event, Failed):
            raise RecordedFailure(event.reason)
        raise AssertionError(f"no result of step {step_id} is recorded here")

    def time_device(self, wanted: bool = True) -> None:
        """The recorded results have their times."""

    def reset_after_failure(self) -> None:
        """Nothing was queued."""

    def shutdown(self) -> None:
        """Nothing to free."""

    # ---------------------------------------------------------------- the observer

    def called(self, method: CoreMethod, args: tuple[object, ...]) -> None:
        """See ``StepObserver.called``."""
        self._take(Called)
        if self._watcher is not None:
            self._watcher.called(method, args)

    def step_started(self) -> None:
        """See ``StepObserver.step_started``."""
        self._take(Started)
        if self._watcher is not None:
            self._watcher.step_started()

    def scheduled(self, plan: SchedulerOutput) -> None:
        """Compare the plan with the recorded one."""
        if not self._expected:
            self._differ("stop", "interrupted while it planned", "planned")
        # Decoded first: a caller may have written 0 for 0.0, and only the first run saw that.
        recorded = decode_plan(self._take(Planned).plan)
        if encode_plan(plan) != encode_plan(recorded):
            raise _Stop(_first_difference(recorded, plan))
        self.step_id = plan.step_id
        if self._watcher is not None:
            self._watcher.scheduled(plan)

    def launched(self, plan: SchedulerOutput) -> None:
        """See ``StepObserver.launched``."""
        self._take(Launched)
        if self._watcher is not None:
            self._watcher.launched(plan)

    def sampling_launched(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None
    ) -> None:
        """See ``StepObserver.sampling_launched``."""
        self._take(SamplingLaunched)
        if self._watcher is not None:
            self._watcher.sampling_launched(plan, grammar_output)

    def waiting(self, plan: SchedulerOutput) -> None:
        """See ``StepObserver.waiting``."""
        self._check_step(self._take(Waiting), plan.step_id)
        if self._watcher is not None:
            self._watcher.waiting(plan)

    def result_arrived(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """See ``StepObserver.result_arrived``."""
        self._check_step(self._take(Arrived), plan.step_id)
        if self._watcher is not None:
            self._watcher.result_arrived(plan, output)

    def step_failed(self, plans: Sequence[SchedulerOutput], reason: str, is_fault: bool) -> None:
        """The watcher hears the recorded reason."""
        recorded = self._take(Failed)
        self._check_step(recorded, plans[0].step_id)
        if self._watcher is not None:
            self._watcher.step_failed(plans, recorded.reason, recorded.is_fault)

    def updated(self, plan: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """See ``StepObserver.updated``."""
        self._check_step(self._take(Updated), plan.step_id)
        if self._watcher is not None:
            self._watcher.updated(plan, outputs)

    def step_finished(self, executed: bool) -> None:
        """See ``StepObserver.step_finished``."""
        recorded = self._take(Finished)
        if recorded.executed != executed:
            self._differ("executed", str(recorded.executed), str(executed))
        if self._watcher is not None:
            self._watcher.step_finished(executed)


class _RecordedResult:
    """A ``StepFuture`` that knows its result when the core asks for it."""

    def __init__(self, replay: Replay, step_id: int) -> None:
        self._replay = replay
        self._step_id = step_id

    def result(self) -> ModelRunnerOutput:
        """The recorded result; raises if the step failed then."""
        return self._replay.result_of(self._step_id)

    def done(self) -> bool:
        """Always."""
        return True


# -- reading calls ---------------------------------------------------------------------------------

_ARGUMENTS: dict[str, type] = {
    "add_request": tuple[EngineCoreRequest],
    "abort_requests": tuple[list[str]],
    "reset_prefix_cache": tuple[bool],
}


def _arguments(call: Called) -> Any:
    return msgspec.msgpack.decode(call.args, type=_ARGUMENTS.get(call.method, tuple[Any, ...]))


def _calls(recording: Recording) -> Iterator[list[AnyEvent]]:
    """One call from outside, or all events of one call of the step function, at a time.

    An abort that the core found in its queue is told between the result and the update.
    """
    step: list[AnyEvent] = []
    for event in recording.events():
        is_inside = bool(step) and isinstance(step[-1], Arrived | Called)
        if isinstance(event, Called) and not is_inside:
            if step:
                yield step
            step = []
            yield [event]
            continue
        if isinstance(event, Started) and step:
            yield step  # it was interrupted
            step = []
        step.append(event)
        if isinstance(event, Finished):
            yield step
            step = []
    if step:
        yield step


def _name(event: Event) -> str:
    return type(event).__name__.lower()


# -- telling plans apart ---------------------------------------------------------------------------


def _first_difference(recorded: SchedulerOutput, replayed: SchedulerOutput) -> Difference:
    then, now = (msgspec.msgpack.decode(encode_plan(plan)) for plan in (recorded, replayed))
    path, then, now = _compare(then, now, "")
    return Difference(
        step=replayed.step_id,
        field=path,
        recorded=then,
        replayed=now,
        recorded_plan=recorded,
        replayed_plan=replayed,
    )


def _compare(recorded: Any, replayed: Any, path: str) -> tuple[str, str, str]:
    """Path of the first place where two plans differ, and the two values, in short."""
    if isinstance(recorded, dict) and isinstance(replayed, dict):
        if list(recorded) != list(replayed):
            return path, _short(list(recorded)), _short(list(replayed))
        pairs = [(f"{path}.{key}" if path else str(key), key) for key in recorded]
    elif (
        isinstance(recorded, list) and isinstance(replayed, list) and len(recorded) == len(replayed)
    ):
        pairs = [(f"{path}[{index}]", index) for index in range(len(recorded))]
    else:
        return path, _short(recorded), _short(replayed)
    for deeper, key in pairs:
        if recorded[key] != replayed[key] or repr(recorded[key]) != repr(replayed[key]):
            return _compare(recorded[key], replayed[key], deeper)
    return path, _short(recorded), _short(replayed)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
