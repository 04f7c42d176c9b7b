"""Figures of HTTP requests: names and labels of prometheus-fastapi-instrumentator, as vLLM's."""

from __future__ import annotations

from collections import defaultdict

from twostep.metrics.histogram import Histogram

DURATION_BOUNDS = (0.1, 0.5, 1.0)
FINE_DURATION_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30,
    60,
)  # fmt: skip


class HttpMetrics:
    """Counted at the end of each request, on the event loop."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = defaultdict(int)
        """By (method, status class such as 2xx, handler)."""
        self.durations: dict[tuple[str, str], Histogram] = {}
        """By (method, handler)."""
        self.fine_duration = Histogram(
            "http_request_duration_highr_seconds",
            "Time of all requests, in fine buckets.",
            FINE_DURATION_BOUNDS,
        )
        self.request_bytes: dict[str, tuple[int, int]] = {}
        """By handler: (requests, bytes of their bodies as declared)."""
        self.response_bytes: dict[str, tuple[int, int]] = {}
        """By handler: (responses, bytes of their bodies as sent)."""

    def observe(
        self,
        method: str,
        status: int,
        handler: str,
        *,
        seconds: float,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """A request has ended. ``handler`` is the route's template, of which there are few."""
        self.requests[method, f"{status // 100}xx", handler] += 1
        duration = self.durations.get((method, handler))
        if duration is None:
            duration = self.durations[method, handler] = Histogram(
                "http_request_duration_seconds", "Time of a request.", DURATION_BOUNDS
            )
        duration.observe(seconds)
        self.fine_duration.observe(seconds)
        _add(self.request_bytes, handler, request_bytes)
        _add(self.response_bytes, handler, response_bytes)


def _add(sizes: dict[str, tuple[int, int]], handler: str, size: int) -> None:
    count, total = sizes.get(handler, (0, 0))
    sizes[handler] = count + 1, total + size
