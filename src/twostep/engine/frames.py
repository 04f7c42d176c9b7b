"""Whole messages over a stream socket, without a thread that passes them on."""

from __future__ import annotations

import socket

HEADER_BYTES = 4
"""Length of the frame that follows, little-endian."""
MAX_FRAME_BYTES = 2**30
"""More is no frame, but a stream that has lost its way."""
RECEIVE_BYTES = 1 << 18


class FrameError(ValueError):
    """What was received is no sequence of frames."""


class FrameSocket:
    """One end of a socket pair. One thread sends, one receives; they may be the same.

    Neither waits: what the other process has no room for is kept here until ``flush``.
    """

    def __init__(self, sock: socket.socket) -> None:
        """``sock`` belongs to this object from now on."""
        self._sock = sock
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor; -1 when closed."""
        return self._sock.fileno()

    @property
    def num_unsent_bytes(self) -> int:
        """What is kept for ``flush``."""
        return len(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send, or keep. Raises OSError if the other end is gone."""
        data = len(frame).to_bytes(HEADER_BYTES, "little") + frame
        if self._unsent:
            self._unsent += data
            return
        sent = self._write(data)
        if sent < len(data):
            self._unsent += data[sent:]

    def flush(self) -> bool:
        """Send what was kept; whether nothing is left. Raises OSError if the other end is gone."""
        if self._unsent:
            del self._unsent[: self._write(self._unsent)]
        return not self._unsent

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def receive(self) -> list[bytes] | None:
        """Frames that have arrived; none if there is nothing to read now; None when nothing more
        will come.

        Raises FrameError.
        """
        frames: list[bytes] = []
        while not frames:
            try:
                data = self._sock.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            except ConnectionResetError:  # it died with something of ours unread
                data = b""
            if not data:
                return None
            self._received += data
            frames = self._whole_frames()
        return frames

    def _whole_frames(self) -> list[bytes]:
        received = self._received
        frames = []
        start = 0
        while len(received) - start >= HEADER_BYTES:
            begin = start + HEADER_BYTES
            length = int.from_bytes(received[start:begin], "little")
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes is announced")
            if len(received) - begin < length:
                break
            start = begin + length
            frames.append(bytes(received[begin:start]))
        del received[:start]
        return frames

    def close(self) -> None:
        """Give the socket back; what is kept is lost. Safe to call twice."""
        self._sock.close()
