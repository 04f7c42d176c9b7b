"""The one real clock."""

from __future__ import annotations

import time


class MonotonicClock:
    """The real clock."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()
