"""The outputs of one request, for a reader that may be slower than the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from twostep.contracts.results import RequestOutput
from twostep.contracts.sampling import RequestOutputKind
from twostep.frontend.output_processor import merge_request_outputs


class RequestStream:
    """An async iterator of ``RequestOutput``, ending after the one with ``finished``.

    Outputs that nobody has fetched yet are merged into one, so that a slow reader costs no more
    memory than the request's own tokens, and loses nothing. For one event loop and one reader.
    """

    def __init__(
        self,
        request_id: str,
        core_ids: Sequence[str],
        kind: RequestOutputKind,
        abort: Callable[[RequestStream], None],
    ) -> None:
        """``core_ids``: the engine core's names of its sequences. ``abort`` ends them there."""
        self.request_id = request_id
        self.core_ids = tuple(core_ids)
        self._kind = kind
        self._abort = abort
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._ended = False
        """Nothing more will be put."""
        self._reader: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the engine has nothing more to say; the last output may still be unread."""
        return self._ended

    def put(self, output: RequestOutput) -> None:
        """News of the request."""
        if self._ended:
            return
        if self._pending is not None:
            output = merge_request_outputs(self._pending, output, self._kind)
        self._pending = output
        self._ended = output.finished
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an exception, raised after what is still unread."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def abort(self) -> None:
        """End the request, if it has not ended; a reader gets a last output saying "abort"."""
        if not self._ended:
            self._abort(self)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            InvalidRequestError: The engine core refused the request.
            EngineDeadError: The engine core stopped.
        """
        while self._pending is None:
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        output, self._pending = self._pending, None
        return output
