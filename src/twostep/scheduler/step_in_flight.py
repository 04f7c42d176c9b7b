"""What the scheduler remembers of a step until its result is here."""

from __future__ import annotations

from collections.abc import Sequence

from twostep.scheduler.request import Request


class StepInFlight:
    """The requests of a plan, in plan order: rows of the result are theirs and nobody else's.

    A later request may have the same id; a request may have been preempted and started again.
    """

    __slots__ = ("chunks", "requests", "step_id")

    def __init__(self, step_id: int, requests: Sequence[Request | None], chunks: set[str]) -> None:
        """``chunks``: requests that compute a part of what they know, and sample nothing."""
        self.step_id = step_id
        self.requests = requests
        """None where the result must be thrown away."""
        self.chunks = chunks

    def drop(self, request: Request) -> None:
        """Throw away what this step computes for a request."""
        self.requests = [None if other is request else other for other in self.requests]
