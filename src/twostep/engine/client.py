"""The engine core in the caller's own process and thread: no sockets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from twostep.contracts.errors import EngineDeadError, InvalidRequestError
from twostep.contracts.live_view import LiveUpdate
from twostep.contracts.outputs import EngineCoreOutputs
from twostep.contracts.pause import PauseMode
from twostep.contracts.request import EngineCoreRequest

if TYPE_CHECKING:
    # A front end with a core in another process would read the whole scheduler for nothing.
    from twostep.engine.core import EngineCore


class InprocClient:
    """Client 0 of an engine core. ``get_output`` drives the core one step at a time."""

    def __init__(self, engine_core: EngineCore) -> None:
        self.engine_core = engine_core

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises InvalidRequestError if it can never be served."""
        self.engine_core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without further news; unknown and finished ids are ignored."""
        self.engine_core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        """Do one step; the news may be empty (the first step is only queued, say).

        Raises EngineDeadError if the core has stopped.
        """
        outputs, _ = self.engine_core.step_fn()
        news = outputs.get(0) if outputs else None
        return news if news is not None else EngineCoreOutputs(outputs=[])

    def has_unfinished_requests(self) -> bool:
        """Whether some request still expects news."""
        return self.engine_core.has_unfinished_requests()

    def has_work(self) -> bool:
        """Whether ``get_output`` has something to do, be it only to tell the runner who ended."""
        return self.engine_core.has_work()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached content. False, and nothing happens, while requests hold blocks."""
        return self.engine_core.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def close(self) -> None:
        """Drop all requests and free the device. Safe to call twice."""
        self.engine_core.shutdown()


class CoreEvents(Protocol):
    """Who is told what an engine core says; all calls come on the event loop."""

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """News of one step."""
        ...

    def on_refused(self, request_id: str, error: InvalidRequestError) -> None:
        """The core does not take a request that was added."""
        ...

    def on_live(self, update: LiveUpdate) -> None:
        """What the engine did; told between ``watch(True)`` and ``watch(False)``."""
        ...

    def on_dead(self, error: EngineDeadError) -> None:
        """The core has stopped. Told once; nothing comes after it."""
        ...


class AsyncCoreClient(Protocol):
    """An engine core that runs elsewhere: requests go there, news come back to ``CoreEvents``."""

    def start(self, events: CoreEvents) -> None:
        """From now on tell ``events``. Called once, on the event loop."""
        ...

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request, without waiting. Raises EngineDeadError."""
        ...

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without further news; unknown ids are ignored, and so is a dead core."""
        ...

    def watch(self, wanted: bool) -> None:
        """Ask for live updates, or for no more; a dead core is ignored."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """See EngineCore.reset_prefix_cache. Raises EngineDeadError."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """See EngineCore.pause. Raises EngineDeadError."""
        ...

    async def resume(self) -> None:
        """See EngineCore.resume. Raises EngineDeadError."""
        ...

    def check_health(self, *, has_work: bool) -> None:
        """Raise EngineDeadError if the core has stopped, or has work and makes no progress."""
        ...

    async def shutdown(self) -> None:
        """Stop the core and free everything. Safe to call twice."""
        ...
