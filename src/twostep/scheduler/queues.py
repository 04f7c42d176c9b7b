"""Waiting requests, in the order in which they should start."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from twostep.config.engine import SchedulingPolicy
from twostep.scheduler.request import Request


class RequestQueue(Protocol):
    """What the scheduler asks of a waiting queue."""

    def add_request(self, request: Request) -> None:
        """A new request joins."""
        ...

    def prepend_request(self, request: Request) -> None:
        """A request that had its turn before comes back."""
        ...

    def peek_request(self) -> Request:
        """The next one to start; the queue is not empty."""
        ...

    def pop_request(self) -> Request:
        """Take the next one to start; the queue is not empty."""
        ...

    def remove_request(self, request: Request) -> None:
        """Take out a request wherever it stands; it is in the queue."""
        ...

    def __len__(self) -> int:
        """Requests waiting."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would start."""
        ...


class FCFSRequestQueue(deque[Request]):
    """First come, first served; a preempted request goes back to the front."""

    def add_request(self, request: Request) -> None:
        """A new request joins at the end."""
        self.append(request)

    def prepend_request(self, request: Request) -> None:
        """A request that had its turn before goes to the front."""
        self.appendleft(request)

    def peek_request(self) -> Request:
        """The next one to start; the queue is not empty."""
        return self[0]

    def pop_request(self) -> Request:
        """Take the next one to start; the queue is not empty."""
        return self.popleft()

    def remove_request(self, request: Request) -> None:
        """Take out a request wherever it stands; it is in the queue."""
        self.remove(request)


class PriorityRequestQueue:
    """Smallest (priority, arrival time, id) first: a total order, whatever the ties."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], Request]] = []

    def add_request(self, request: Request) -> None:
        """A request takes the place its priority gives it."""
        heapq.heappush(self._heap, (request.sort_key, request))

    def prepend_request(self, request: Request) -> None:
        """There is no front to go to: as ``add_request``."""
        self.add_request(request)

    def peek_request(self) -> Request:
        """The next one to start; the queue is not empty."""
        return self._heap[0][1]

    def pop_request(self) -> Request:
        """Take the next one to start; the queue is not empty."""
        return heapq.heappop(self._heap)[1]

    def remove_request(self, request: Request) -> None:
        """Take out a request wherever it stands; it is in the queue."""
        self._heap.remove((request.sort_key, request))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would start."""
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))


def make_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """The queue of a policy."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
