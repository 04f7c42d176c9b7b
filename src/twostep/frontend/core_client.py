"""The client of an engine core in another process, on an asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

from twostep.contracts import errors
from twostep.contracts.engine_info import EngineInfo
from twostep.contracts.errors import EngineDeadError, InvalidRequestError, TwostepError
from twostep.contracts.pause import PauseMode
from twostep.contracts.request import EngineCoreRequest
from twostep.engine.client import CoreEvents
from twostep.engine.frames import FrameError
from twostep.engine.wire import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    Codec,
    CoreMessage,
    LastWords,
    Live,
    LoadProgress,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Watch,
    WireError,
)
from twostep.frontend.core_process import CoreProcess

Progress = Callable[[str, float], None]

MAX_UNREAD_BYTES = 1 << 28
"""Kept for a core that does not read; with more, it counts as dead."""
SHUTDOWN_SECONDS = 10.0
"""For the core to end by itself (a trace may have to be written); then it is killed."""
DEATH_POLLS = 50
DEATH_POLL_SECONDS = 5e-3
"""A dead child's exit code is asked for this often before it is called unknown."""
DEAF = "the engine core has stopped reading: restart it"


class AsyncMPClient:
    """See AsyncCoreClient. ``wait_until_ready`` comes before ``start``."""

    def __init__(self, process: CoreProcess, clock: Callable[[], float] = time.monotonic) -> None:
        """Talk to a process that was just started; it belongs to this object from now on.

        On the running event loop. ``clock``: seconds of the system's monotonic clock.
        """
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._codec = Codec()
        self._events: CoreEvents | None = None
        self._on_progress: Progress | None = None
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._calls: dict[int, asyncio.Future[bool | None]] = {}
        self._next_call_id = 0
        self._dead: TwostepError | None = None
        self._ended = self._loop.create_future()
        """Done when the child has ended."""
        self._stopping = False
        self._deaf = False
        """A message found no room: nothing more is sent, and the core is over within moments."""
        self._heartbeat_timeout = 0.0
        self._last_words: LastWords | None = None
        self._process = process
        self._wire = process.wire
        self._loop.add_reader(self._wire.fileno(), self._read)

    @property
    def pid(self) -> int:
        """The core's process id."""
        return self._process.pid

    # -- starting ----------------------------------------------------------------------------

    async def wait_until_ready(self, on_progress: Progress | None = None) -> EngineInfo:
        """Wait for the model to be loaded; progress is told on the event loop.

        Raises what the core raised while loading, or EngineDeadError. ``shutdown`` is due then,
        too.
        """
        self._on_progress = on_progress
        info = await self._ready
        self._heartbeat_timeout = info.heartbeat_timeout
        return info

    def start(self, events: CoreEvents) -> None:
        """See AsyncCoreClient."""
        self._events = events
        if self._dead is not None:
            self._loop.call_soon(events.on_dead, self._as_dead())

    # -- to the core -------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """See AsyncCoreClient."""
        self._send(AddRequest(request))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """See AsyncCoreClient."""
        with contextlib.suppress(EngineDeadError):
            self._send(AbortRequests(list(request_ids)))

    def watch(self, wanted: bool) -> None:
        """See AsyncCoreClient."""
        with contextlib.suppress(EngineDeadError):
            self._send(Watch(wanted))

    async def reset_prefix_cache(self) -> bool:
        """See AsyncCoreClient."""
        return bool(await self._call("reset_prefix_cache"))

    async def pause(self, mode: PauseMode) -> None:
        """See AsyncCoreClient."""
        await self._call("pause", mode)

    async def resume(self) -> None:
        """See AsyncCoreClient."""
        await self._call("resume")

    async def _call(self, method: UtilityMethod, argument: str | None = None) -> bool | None:
        call_id = self._next_call_id
        self._next_call_id += 1
        self._send(UtilityCall(call_id, method, argument))
        answer: asyncio.Future[bool | None] = self._loop.create_future()
        self._calls[call_id] = answer
        try:
            value = await answer
        finally:
            self._calls.pop(call_id, None)
        return value

    def _send(self, message: ClientMessage) -> None:
        if self._dead is not None or self._stopping:
            raise self._as_dead()
        if not self._deaf:
            with contextlib.suppress(OSError):
                self._wire.send(self._codec.encode(message))
                if not self._wire.num_unsent_bytes:
                    return
                if self._wire.num_unsent_bytes <= MAX_UNREAD_BYTES:
                    self._loop.add_writer(self._wire.fileno(), self._flush)
                    return
            # Either it hangs, or it has just died: then its end of file tells how.
            self._deaf = True
            self._loop.call_later(DEATH_POLLS * DEATH_POLL_SECONDS, self._end_deaf_core)
        raise EngineDeadError(DEAF)

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # it has died, which will be read
            if not self._wire.flush():
                return
        self._loop.remove_writer(self._wire.fileno())

    def _end_deaf_core(self) -> None:
        if not self._process.has_ended():
            self._process.kill()
            self._die(EngineDeadError(DEAF))

    # -- from the core -----------------------------------------------------------------------

    def _read(self) -> None:
        """All that has arrived; at its end, the process has ended.

        uvloop calls a reader once, and never again, where the other end died with something of ours
        unread: what is left behind then, the end included, is lost.
        """
        try:
            while frames := self._wire.receive():
                for frame in frames:
                    self._handle(self._codec.decode_core_message(frame))
        except (FrameError, WireError) as error:
            self._process.kill()  # its news can't be trusted to be complete
            self._die(EngineDeadError(f"the engine core was stopped: {error}"))
            return
        if frames is None:
            self._loop.remove_reader(self._wire.fileno())
            self._loop.remove_writer(self._wire.fileno())
            self._note_death(DEATH_POLLS)

    def _handle(self, message: CoreMessage) -> None:
        events = self._events
        match message:
            case Outputs():
                if events is not None:
                    events.on_outputs(message.outputs)
            case Refused():
                if events is not None:
                    error = InvalidRequestError(message.message, message.param, message.code)
                    events.on_refused(message.request_id, error)
            case UtilityResult():
                self._take_answer(message)
            case Live():
                if events is not None:
                    events.on_live(message.update)
            case LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message.phase, message.fraction)
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message.info)
            case LastWords():
                self._last_words = message

    def _take_answer(self, answer: UtilityResult) -> None:
        future = self._calls.get(answer.call_id)
        if future is None or future.done():
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(InvalidRequestError(answer.error))

    # -- life and death ----------------------------------------------------------------------

    def check_health(self, *, has_work: bool) -> None:
        """See AsyncCoreClient."""
        if self._dead is not None or self._stopping:
            raise self._as_dead()
        beat, progress, _ = self._process.heartbeat.read()
        silent = self._clock() - (progress if has_work else beat)
        if silent > self._heartbeat_timeout:
            raise EngineDeadError(
                f"the engine core has shown no progress for {silent:.0f} s "
                f"(the limit is {self._heartbeat_timeout:.0f} s): it may hang; restart it"
            )

    def _note_death(self, polls_left: int) -> None:
        """Descriptors close a moment before the exit code can be had."""
        if not self._process.has_ended():
            if polls_left == 0:
                self._process.kill()  # it has closed its end, whatever it does now
            self._loop.call_later(DEATH_POLL_SECONDS, self._note_death, polls_left - 1)
            return
        self._die(self._why())
        if not self._ended.done():
            self._ended.set_result(None)

    def _why(self) -> TwostepError:
        if self._last_words is not None:
            return _as_error(self._last_words)
        how = self._process.exit_words()
        cause = " while loading the model" if not self._ready.done() else ""
        hint = " (out of memory?)" if "SIGKILL" in how else ""
        return EngineDeadError(f"the engine core ended{cause}: {how}{hint}; restart it")

    def _die(self, error: TwostepError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it may be nobody's business any more
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._as_dead())
        if self._events is not None and not self._stopping:
            self._events.on_dead(self._as_dead())

    def _as_dead(self) -> EngineDeadError:
        if self._stopping:
            return EngineDeadError("the engine was shut down")
        error = self._dead
        return error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))

    async def shutdown(self, *, kill: bool = False) -> None:
        """See AsyncCoreClient. ``kill``: do not wait for what the core is doing."""
        if kill:
            self._process.kill()
        if not self._stopping:
            with contextlib.suppress(EngineDeadError):
                self._send(Shutdown())
            self._stopping = True
        done, _ = await asyncio.wait([self._ended], timeout=SHUTDOWN_SECONDS)
        if not done:
            self._process.kill()
            await asyncio.wait([self._ended])
        self._process.close()


def _as_error(words: LastWords) -> TwostepError:
    """The error that ended the core, as it was raised there."""
    kind = getattr(errors, words.kind, None)
    if isinstance(kind, type) and issubclass(kind, TwostepError):
        return kind(words.message)
    return EngineDeadError(words.message)
