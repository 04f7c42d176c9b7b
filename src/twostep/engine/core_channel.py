"""The engine core's end of the wire."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from typing import Protocol

from twostep.engine.frames import FrameSocket
from twostep.engine.wire import Codec, CoreMessage


class CoreChannel(Protocol):
    """Where an engine core's messages come from and go to."""

    def receive(self) -> bytes | None:
        """The next frame; waits. None when nothing more will come. Input thread only."""
        ...

    def send(self, message: CoreMessage) -> None:
        """Send without waiting; what a reader has no room for is kept."""
        ...

    def flush(self) -> bool:
        """Send what was kept; whether nothing is left."""
        ...

    def stop_receiving(self) -> None:
        """Make ``receive`` return None. From any thread."""
        ...


class SocketCoreChannel:
    """See CoreChannel. One thread receives, another one sends."""

    def __init__(self, wire: FrameSocket) -> None:
        self._wire = wire
        self._codec = Codec()
        self._arrived: deque[bytes] = deque()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._poller = select.poll()
        self._poller.register(wire, select.POLLIN)
        self._poller.register(self._stop_reader, select.POLLIN)

    def receive(self) -> bytes | None:
        """See CoreChannel. Nothing more comes when the other process has died."""
        while not self._arrived:
            ready = [fd for fd, _ in self._poller.poll()]
            frames = None if self._stop_reader.fileno() in ready else self._wire.receive()
            if frames is None:
                self._stop_reader.close()
                return None
            self._arrived += frames
        return self._arrived.popleft()

    def send(self, message: CoreMessage) -> None:
        """See CoreChannel."""
        with contextlib.suppress(OSError):  # the other process has died: the input thread hears it
            self._wire.send(self._codec.encode(message))

    def flush(self) -> bool:
        """See CoreChannel."""
        try:
            return self._wire.flush()
        except OSError:
            return True

    def stop_receiving(self) -> None:
        """See CoreChannel."""
        self._stop_writer.close()
