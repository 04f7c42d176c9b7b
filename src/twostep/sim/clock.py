"""Time that passes only when somebody says so."""

from __future__ import annotations


class VirtualClock:
    """A ``Clock`` in virtual seconds, from 0. Moved by whoever waits for the device."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def advance_to(self, moment: float) -> None:
        """Wait until ``moment``; a moment that is past takes no time."""
        self._now = max(self._now, moment)
