"""Signs of life in shared memory: read without a lock and without the help of a stuck process."""

from __future__ import annotations

import mmap
import os
import tempfile

_SIZE = mmap.PAGESIZE


class Heartbeat:
    """Three numbers in a mapped file: one process writes them, others look.

    Each is written at once, eight bytes where they belong: a writer may be killed, and a reader
    look, at any moment. (``struct.pack_into`` clears the bytes first.)

    Times are seconds of the system's monotonic clock. The file has no name: whoever shall see it
    gets a descriptor of it.
    """

    def __init__(self, fd: int) -> None:
        """Map a file that ``create`` made. The descriptor may be closed then."""
        self._memory = memory = mmap.mmap(fd, _SIZE)
        self._times = memoryview(memory).cast("d")
        self._counts = memoryview(memory).cast("Q")

    @classmethod
    def create(cls, now: float) -> tuple[Heartbeat, int]:
        """A new one whose times are ``now``, and the descriptor for the other side, to be closed.

        The file is written in full, so that a full disk shows here.
        """
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(bytes(_SIZE))
            heartbeat = cls(file.fileno())
            heartbeat.beat(now, now, 0)
            return heartbeat, os.dup(file.fileno())

    def beat(self, now: float, progress: float, steps: int) -> None:
        """The loop runs, ``progress`` is when it last had a step to show (or nothing to do)."""
        self._times[1] = progress
        self._times[0] = now
        self._counts[2] = steps

    def read(self) -> tuple[float, float, int]:
        """Time of the last beat, of the last progress, and the number of steps so far."""
        return self._times[0], self._times[1], self._counts[2]

    def close(self) -> None:
        """Unmap. Safe to call twice."""
        self._times.release()
        self._counts.release()
        self._memory.close()
