"""Somebody who watches the engine: updates that wait to be read, the newest ones."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from twostep.contracts.errors import EngineDeadError
from twostep.contracts.live_view import LiveUpdate

MAX_UNREAD = 20
"""Updates that wait for a slow reader, some two seconds; then the oldest are thrown away."""


class LiveWatch:
    """An async iterator of updates; ends with the engine."""

    def __init__(self) -> None:
        self._unread: deque[LiveUpdate] = deque()
        self._num_dropped = 0
        self._news = asyncio.Event()
        self._dead: EngineDeadError | None = None

    def put(self, update: LiveUpdate) -> None:
        """An update for the reader."""
        if len(self._unread) == MAX_UNREAD:
            self._unread.popleft()
            self._num_dropped += 1
        self._unread.append(update)
        self._news.set()

    def fail(self, error: EngineDeadError) -> None:
        """Nothing more will come; the reader gets ``error`` after what is unread."""
        self._dead = error
        self._news.set()

    def __aiter__(self) -> LiveWatch:
        return self

    async def __anext__(self) -> LiveUpdate:
        while not self._unread:
            if self._dead is not None:
                raise self._dead
            self._news.clear()
            await self._news.wait()
        update = self._unread.popleft()
        if self._num_dropped:
            dropped, self._num_dropped = self._num_dropped, 0
            update = msgspec.structs.replace(update, num_dropped=update.num_dropped + dropped)
        return update
