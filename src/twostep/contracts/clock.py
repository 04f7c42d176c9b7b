"""Where the planning half gets the time from, so that a simulator can drive it."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A clock that never goes backwards; handed in, never imported."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""
        ...
