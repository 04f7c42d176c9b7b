"""An engine core that begins to load before the program that will talk to it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostep.frontend.core_process import CoreProcess


class EarlyCore:
    """Holds the process until somebody takes it; ends it if nobody does.

    A server needs as long to import itself as a core to load a small model: they do it side by
    side.
    """

    def __init__(self, process: CoreProcess | None = None) -> None:
        """Without a ``process`` there is nothing to take: the model has to be fetched first."""
        self._process = process

    def take(self) -> CoreProcess | None:
        """The process, once; it belongs to the caller from now on."""
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        """End the process unless somebody took it."""
        if (process := self.take()) is not None:
            process.abandon()
