"""Signs of life in shared memory: read without a lock and without the help of a stuck process."""

from __future__ import annotations

import mmap
from pathlib import Path

HEARTBEAT_FILE = "heartbeat"
"""Its name, in the private folder of the two processes."""

_SIZE = mmap.PAGESIZE


class Heartbeat:
    """Three numbers in a mapped file: one process writes them, others look.

    Each is written at once, eight bytes where they belong: a writer may be killed, and a reader
    look, at any moment. (``struct.pack_into`` clears the bytes first.)

    Times are seconds of the system's monotonic clock. The file may be deleted once both sides
    have opened it.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._times = memoryview(memory).cast("d")
        self._counts = memoryview(memory).cast("Q")

    @classmethod
    def create(cls, path: Path, now: float) -> Heartbeat:
        """A new file, written in full so that a full disk shows here; its times are ``now``."""
        with path.open("xb+") as file:
            file.write(bytes(_SIZE))
            file.flush()
            heartbeat = cls(mmap.mmap(file.fileno(), _SIZE))
        heartbeat.beat(now, now, 0)
        return heartbeat

    @classmethod
    def open(cls, path: Path) -> Heartbeat:
        """A file that ``create`` made."""
        with path.open("rb+") as file:
            return cls(mmap.mmap(file.fileno(), _SIZE))

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
