"""The generation requests that run: who they are, how many wait, and how they are ended early."""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import Callable
from types import TracebackType

from twostep.server.errors import ApiError, overloaded


class Interrupt(enum.Enum):
    """Why a request ends before its time."""

    DISCONNECTED = "the client has gone"
    TIMED_OUT = "the request took too long"
    SHUTTING_DOWN = "the server is ending"


class RequestInterrupted(Exception):
    """Raised in the task of a request that was interrupted."""

    def __init__(self, why: Interrupt) -> None:
        super().__init__(why.value)
        self.why = why

    def api_error(self) -> ApiError:
        """What a client that is still there is told."""
        if self.why is Interrupt.TIMED_OUT:
            return ApiError(
                "request_timeout",
                "the request took longer than the server allows (--request-timeout)",
            )
        return shutting_down()


def shutting_down() -> ApiError:
    """The server takes no more requests, or cuts those that run."""
    return overloaded("the server is shutting down; ask another one", "shutting_down")


class InFlight:
    """All generation requests between admission and their last byte."""

    def __init__(
        self,
        *,
        max_queued_reqs: int | None = None,
        max_queued_tokens: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """``timeout``: seconds for a whole request."""
        self.on_rejected: Callable[[str], None] = lambda reason: None
        """Told the name of the limit that turned a request away."""
        self._limits = {
            "max_num_queued_reqs": max_queued_reqs,
            "max_num_queued_tokens": max_queued_tokens,
        }
        self._timeout = timeout
        self._scopes: set[RequestScope] = set()
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self.queued_reqs = 0
        """Sequences that have not got their first token."""
        self.queued_tokens = 0
        """Prompt tokens of those."""

    def __len__(self) -> int:
        return len(self._scopes)

    def next_number(self) -> int:
        """A number that no other request of this server gets."""
        return next(self._numbers)

    def admit(self, num_seqs: int, num_tokens: int) -> RequestScope:
        """A place for so many sequences and prompt tokens; ApiError if there is none."""
        self.check_room(num_seqs, num_tokens)
        return RequestScope(self, num_seqs, num_tokens, self._timeout)

    def exceeded(self, num_seqs: int = 1, num_tokens: int = 1) -> str | None:
        """The name of the limit that leaves no place for so many sequences and prompt tokens.

        A request that is alone is never refused.
        """
        if self.queued_reqs:
            limits = self._limits
            most = limits["max_num_queued_reqs"]
            if most is not None and self.queued_reqs + num_seqs > most:
                return "max_num_queued_reqs"
            most = limits["max_num_queued_tokens"]
            if most is not None and self.queued_tokens + num_tokens > most:
                return "max_num_queued_tokens"
        return None

    def check_room(self, num_seqs: int = 1, num_tokens: int = 1) -> None:
        """Raise ApiError if there is no place for so many sequences and prompt tokens."""
        limit = self.exceeded(num_seqs, num_tokens)
        if limit is not None:
            raise self.refuse(limit)

    def refuse(self, limit: str) -> ApiError:
        """The answer, always the same, for who is turned away by a limit; counted as such."""
        self.on_rejected(limit)
        what = "requests" if limit == "max_num_queued_reqs" else "prompt tokens"
        return overloaded(
            f"no more than {self._limits[limit]} {what} may wait (--{limit.replace('_', '-')}); "
            "come again later"
        )

    def interrupt_all(self, why: Interrupt) -> None:
        """End all of them."""
        for scope in list(self._scopes):
            scope.interrupt(why)

    async def wait_idle(self) -> None:
        """Return when none is left."""
        await self._idle.wait()

    def enter(self, scope: RequestScope) -> None:
        """A request begins."""
        self._scopes.add(scope)
        self._idle.clear()
        self.queued_reqs += scope.num_seqs
        self.queued_tokens += scope.num_tokens

    def leave_queue(self, scope: RequestScope) -> None:
        """A request has got its first token, or has ended."""
        self.queued_reqs -= scope.num_seqs
        self.queued_tokens -= scope.num_tokens

    def leave(self, scope: RequestScope) -> None:
        """A request has ended."""
        self._scopes.discard(scope)
        if not self._scopes:
            self._idle.set()


class RequestScope:
    """``async with`` around the work of one request; ``interrupt`` ends it from outside."""

    def __init__(
        self, in_flight: InFlight, num_seqs: int, num_tokens: int, timeout: float | None
    ) -> None:
        self.num_seqs = num_seqs
        self.num_tokens = num_tokens
        self._in_flight = in_flight
        self._timeout = asyncio.timeout(timeout)
        self._why = Interrupt.TIMED_OUT
        self._queued = True
        self._open = False

    def started(self) -> None:
        """The first token is here: the request no longer waits."""
        if self._queued:
            self._queued = False
            self._in_flight.leave_queue(self)

    def interrupt(self, why: Interrupt) -> None:
        """Raise RequestInterrupted in the task that is inside; nothing if it has left."""
        if self._open and not self._timeout.expired():
            self._why = why
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> RequestScope:
        await self._timeout.__aenter__()
        self._open = True
        self._in_flight.enter(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open = False
        self.started()
        self._in_flight.leave(self)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise RequestInterrupted(self._why) from None
