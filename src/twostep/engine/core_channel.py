"""The engine core's ends of the sockets."""

from __future__ import annotations

import socket
from typing import Protocol

import zmq

from twostep.engine.wire import Codec, CoreMessage

IN_ADDRESS = "in"
"""File name of the socket that the core reads, in the private folder of the two processes."""
OUT_ADDRESS = "out"
"""Of the one it writes."""
MAX_UNSENT_MESSAGES = 1000
"""News that wait for a front end that does not read; then the core stops planning."""
RECONNECT_MS = 10
"""A core may be ready to connect before the other process listens."""
LINGER_MS = 2000
"""How long an ending core waits for its last news to be read."""


class CoreChannel(Protocol):
    """Where an engine core's messages come from and go to."""

    def receive(self) -> bytes | None:
        """The next frame; waits. None when nothing more will come. Input thread only."""
        ...

    def send(self, message: CoreMessage) -> bool:
        """Send without waiting; False, and nothing is sent, if the reader is too far behind."""
        ...

    def stop_receiving(self) -> None:
        """Make ``receive`` return None. From any thread."""
        ...

    def close(self) -> None:
        """Free the sending side, after its last messages."""
        ...


class ZmqCoreChannel:
    """Sockets in a folder that only this user can enter.

    One thread receives, another one sends. ZMQ's own thread does the writing: a message is
    handed over in microseconds, without waiting for the interpreter lock of a Python thread.
    """

    def __init__(self, directory: str, tie: socket.socket) -> None:
        """Connect. ``tie``: the other process holds the other end; its end of file ends us."""
        self._context = zmq.Context()
        self._output = self._context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, MAX_UNSENT_MESSAGES)
        self._output.setsockopt(zmq.LINGER, LINGER_MS)
        self._output.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._output.connect(f"ipc://{directory}/{OUT_ADDRESS}")
        self._input = self._context.socket(zmq.PULL)
        self._input.setsockopt(zmq.RCVHWM, 0)
        self._input.setsockopt(zmq.LINGER, 0)
        self._input.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._input.connect(f"ipc://{directory}/{IN_ADDRESS}")
        self._tie = tie
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._poller = zmq.Poller()
        self._poller.register(self._input, zmq.POLLIN)
        self._poller.register(self._tie.fileno(), zmq.POLLIN)
        self._poller.register(self._stop_reader.fileno(), zmq.POLLIN)
        self._codec = Codec()

    def receive(self) -> bytes | None:
        """See CoreChannel. Nothing more comes when the other process has died."""
        while True:
            ready = dict(self._poller.poll())
            if self._input in ready:
                frame: bytes = self._input.recv()
                return frame
            if ready:
                self._input.close()
                return None

    def send(self, message: CoreMessage) -> bool:
        """See CoreChannel."""
        try:
            self._output.send(self._codec.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def stop_receiving(self) -> None:
        """See CoreChannel."""
        self._stop_writer.close()

    def close(self) -> None:
        """See CoreChannel. After ``receive`` has returned None."""
        self._output.close()
        self._context.term()
        self._stop_reader.close()
        self._stop_writer.close()
