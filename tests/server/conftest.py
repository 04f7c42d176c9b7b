"""One server for most tests; those that end it make their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[LiveServer]:
    """Lives as long as the tests do."""
    with live_server() as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server with a core that forgot what other tests wanted."""

    def reset() -> None:
        events = shared_server.core._events
        shared_server.core.reset()
        shared_server.core._events = events

    shared_server.call(reset)
    yield shared_server
    shared_server.wait_until(lambda: not len(shared_server.state.in_flight))
