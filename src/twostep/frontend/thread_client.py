"""An engine core on a thread of this process, behind the interface of one in its own process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

from twostep.contracts.errors import EngineDeadError, InvalidRequestError
from twostep.contracts.request import EngineCoreRequest
from twostep.engine.client import CoreEvents
from twostep.engine.core import EngineCore, PauseMode


class ThreadClient:
    """Runs an EngineCore's loop on a thread of its own."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="twostep-core", daemon=True)
        self._dead: EngineDeadError | None = None

    def start(self, events: CoreEvents) -> None:
        """See AsyncCoreClient."""
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def add_request(self, request: EngineCoreRequest) -> None:
        """See AsyncCoreClient."""

        def add() -> None:
            try:
                self._core.add_request(request)
            except InvalidRequestError as error:
                self._tell(self._events.on_refused, request.request_id, error)

        self._calls.put(add)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """See AsyncCoreClient."""
        ids = list(request_ids)
        self._core.aborts_queue.put(ids)
        self._calls.put(lambda: self._core.abort_requests(ids))

    async def reset_prefix_cache(self) -> bool:
        """See AsyncCoreClient."""
        return bool(await self._call(self._core.reset_prefix_cache))

    async def pause(self, mode: PauseMode) -> None:
        """See AsyncCoreClient."""
        await self._call(lambda: self._core.pause(mode))

    async def resume(self) -> None:
        """See AsyncCoreClient."""
        await self._call(self._core.resume)

    def check_health(self, *, has_work: bool) -> None:
        """See AsyncCoreClient."""
        if self._dead is not None:
            raise self._dead

    async def shutdown(self) -> None:
        """See AsyncCoreClient."""
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)
        self._core.shutdown()

    async def _call(self, function: Callable[[], Any]) -> Any:
        future = self._loop.create_future()

        def call() -> None:
            self._tell(future.set_result, function())

        self._calls.put(call)
        return await future

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            while True:
                while not self._calls.empty() or not self._core.has_work():
                    call = self._calls.get()
                    if call is None:
                        return
                    call()
                outputs, _ = self._core.step_fn()
                for each in (outputs or {}).values():
                    self._tell(self._events.on_outputs, each)
        except Exception as error:
            self._dead = EngineDeadError(f"the engine core stopped ({error}): restart it")
            self._tell(self._events.on_dead, self._dead)
