"""The engine core as a process of its own: an input thread, and a loop that never waits for I/O.

The input thread decodes frames while the device computes. Aborts go two ways: into the core's
``aborts_queue``, which is looked at before a result is processed, and into the input queue, for a
request that has not been taken out of it yet. Aborting twice is harmless.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from twostep.contracts.clock import Clock
from twostep.contracts.errors import EngineDeadError, InvalidRequestError
from twostep.contracts.live_view import LiveUpdate
from twostep.engine.admission import check_token_ids
from twostep.engine.core import EngineCore
from twostep.engine.core_channel import CoreChannel
from twostep.engine.fan_out import together
from twostep.engine.heartbeat import Heartbeat
from twostep.engine.live_view import LiveView
from twostep.engine.wire import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    Codec,
    Live,
    Outputs,
    Refused,
    Shutdown,
    UtilityCall,
    UtilityResult,
    Watch,
    WireError,
)

logger = logging.getLogger(__name__)

IDLE_BEAT_SECONDS = 1.0
"""Between signs of life while there is nothing to do."""
RETRY_SECONDS = 1e-3
"""Before the core is asked again, when it had work but nothing could be planned."""
READER_SECONDS = 1e-2
"""Before it is looked again whether a reader that is behind has made room."""


class EngineCoreProc:
    """Runs an EngineCore for a client at the other end of a channel."""

    def __init__(
        self,
        core: EngineCore,
        channel: CoreChannel,
        heartbeat: Heartbeat,
        clock: Clock,
        *,
        vocab_size: int,
    ) -> None:
        """Core and channel belong to this object from now on."""
        self._core = core
        self._channel = channel
        self._heartbeat = heartbeat
        self._clock = clock
        self._vocab_size = vocab_size
        self._input_queue: SimpleQueue[ClientMessage] = SimpleQueue()
        self._input_thread = threading.Thread(
            target=self._read_input, name="twostep-core-input", daemon=True
        )
        self._calls_when_idle: list[Callable[[], None]] = []
        """Answers that are owed when nothing is left to do."""
        self._live: LiveView | None = None
        """While somebody watches."""
        self._others = core.observer
        """Who observes the core for as long as it lives."""
        self._running = True
        self._steps = 0
        self._progress = clock.monotonic()
        self._show_progress()

    def run(self) -> None:
        """Serve until told to shut down, or until the client has gone.

        Raises whatever ended the core (EngineDeadError, mostly); everything is freed either way.
        """
        self._input_thread.start()
        try:
            while self._take_input():
                self._step()
        finally:
            self._channel.stop_receiving()
            self._input_thread.join()
            self._core.shutdown()

    # -- the busy loop -----------------------------------------------------------------------

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        if outputs:
            for news in outputs.values():
                self._channel.send(Outputs(news))
        now = self._clock.monotonic()
        if executed or outputs:
            self._steps += executed
            self._progress = now
        elif self._core.has_work():
            self._wait_for_input(RETRY_SECONDS)  # for a grammar, say
        self._heartbeat.beat(now, self._progress, self._steps)

    def _take_input(self) -> bool:
        """Handle what has arrived, or wait while there is nothing to do. False to end."""
        while self._running:
            if not self._channel.flush():
                self._wait_for_reader()
            elif not self._input_queue.empty():
                self._handle(self._input_queue.get())
            elif self._core.has_work():
                return True
            else:
                self._be_idle()
        return False

    def _be_idle(self) -> None:
        while not self._core.aborts_queue.empty():  # all of it came by the input queue as well
            self._core.aborts_queue.get()
        calls, self._calls_when_idle = self._calls_when_idle, []
        for call in calls:
            call()
        if not calls:
            self._wait_for_input(IDLE_BEAT_SECONDS)
        self._show_progress()

    def _wait_for_input(self, seconds: float) -> None:
        try:
            message = self._input_queue.get(timeout=seconds)
        except Empty:
            return
        self._handle(message)

    def _show_progress(self) -> None:
        """Alive, and nothing is left undone by us."""
        self._progress = self._clock.monotonic()
        self._heartbeat.beat(self._progress, self._progress, self._steps)

    # -- messages ----------------------------------------------------------------------------

    def _handle(self, message: ClientMessage) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequests():
                self._core.abort_requests(message.request_ids)
            case UtilityCall():
                self._call(message)
            case Watch():
                self._watch(message.wanted)
            case Shutdown():
                self._running = False

    def _add(self, message: AddRequest) -> None:
        request = message.request
        try:
            check_token_ids(request, self._vocab_size)
            self._core.add_request(request)
        except InvalidRequestError as error:
            refused = Refused(request.request_id, str(error), error.param, error.code)
            self._channel.send(refused)
        except EngineDeadError:
            raise
        except Exception as error:  # it has not entered the scheduler: nobody else is concerned
            logger.exception("request %s could not be taken", request.request_id)
            words = f"the engine core could not take it ({type(error).__name__}: {error})"
            self._channel.send(Refused(request.request_id, words, None, "invalid_value"))

    def _call(self, call: UtilityCall) -> None:
        """Methods that end something are answered when it has ended."""
        core = self._core
        match call.method, call.argument:
            case "reset_prefix_cache", _:
                if core.has_unfinished_requests():
                    self._answer(call, core.reset_prefix_cache())
                else:  # a last step may still hold blocks
                    self._calls_when_idle.append(
                        lambda: self._answer(call, core.reset_prefix_cache())
                    )
            case "pause", ("abort" | "wait" | "keep") as mode:
                core.pause(mode)
                self._calls_when_idle.append(lambda: self._answer(call))
            case "resume", _:
                core.resume()
                self._answer(call)
            case _:
                error = f"{call.method}: unknown mode {call.argument!r}"
                self._channel.send(UtilityResult(call.call_id, None, error))

    def _watch(self, wanted: bool) -> None:
        """Put an observer for the watchers into the core, or take it out."""
        core = self._core
        if not wanted:
            core.observer, self._live = self._others, None
            core.executor.time_device(self._others is not None)
            return
        if self._live is None:
            core.executor.time_device(True)
            self._live = LiveView(core.scheduler, self._clock, self._send_live)
            core.observer = together(self._others, self._live)
        self._live.show_all()

    def _send_live(self, update: LiveUpdate) -> bool:
        """News go first: nobody's tokens wait for a watcher."""
        if not self._channel.flush():
            return False
        self._channel.send(Live(update))
        return True

    def _answer(self, call: UtilityCall, value: bool | None = None) -> None:
        self._channel.send(UtilityResult(call.call_id, value))

    def _wait_for_reader(self) -> None:
        """It is behind. Nothing is planned meanwhile, so there is little that is kept for it; the
        core is well, and takes requests."""
        self._wait_for_input(READER_SECONDS)
        self._show_progress()

    # -- the input thread --------------------------------------------------------------------

    def _read_input(self) -> None:
        codec = Codec()
        try:
            while (frame := self._channel.receive()) is not None:
                try:
                    message = codec.decode_client_message(frame)
                except WireError as error:
                    logger.error("%s", error)
                    continue
                if isinstance(message, AbortRequests):
                    self._core.aborts_queue.put(message.request_ids)
                self._input_queue.put(message)
        finally:  # nobody would hear the client any more
            self._input_queue.put(Shutdown())
