"""The engine as it works, streamed to whoever looks: ``GET /engine/events``."""

from __future__ import annotations

import asyncio
from typing import Any

from twostep.contracts.errors import EngineDeadError
from twostep.frontend.live_watch import LiveWatch
from twostep.server.errors import from_exception
from twostep.server.http import ClientGone, HttpCall
from twostep.server.sse import EventStream, error_event, event
from twostep.server.state import ServerState


async def engine_events(state: ServerState, call: HttpCall) -> None:
    """Each event is a ``LiveUpdate``; the stream ends with the client or with the engine."""
    settings = state.settings
    with state.engine.watch() as watch:
        events = EventStream(
            call,
            keep_alive=settings.sse_keep_alive_interval,
            stall_timeout=settings.stream_stall_timeout,
        )
        gone = asyncio.ensure_future(_until_gone(call))
        try:
            await _forward(watch, events, gone)
        finally:
            gone.cancel()
            events.close()


async def _forward(watch: LiveWatch, events: EventStream, gone: asyncio.Future[None]) -> None:
    while True:
        update = asyncio.ensure_future(anext(watch))
        try:
            first: list[asyncio.Future[Any]] = [update, gone]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone
            await events.write(event(update.result()))
        except EngineDeadError as error:
            await events.finish(error_event(from_exception(error)))
            return
        finally:
            update.cancel()


async def _until_gone(call: HttpCall) -> None:
    while (await call.receive())["type"] != "http.disconnect":
        pass
