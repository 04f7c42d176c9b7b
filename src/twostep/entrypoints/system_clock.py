"""The one real clock."""

from __future__ import annotations

import time


class MonotonicClock:
    """The real clock."""

    monotonic = staticmethod(time.monotonic)
    """Seconds since some fixed moment."""
