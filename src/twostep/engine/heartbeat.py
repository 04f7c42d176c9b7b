"""Signs of life in shared memory: read without a lock and without the help of a stuck process."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

HEARTBEAT_FILE = "heartbeat"
"""Its name, in the private folder of the two processes."""

_FORMAT = struct.Struct("<ddQ")
_SIZE = mmap.PAGESIZE


class Heartbeat:
    """Three numbers in a mapped file: one process writes them, others look.

    Times are seconds of the system's monotonic clock. The file may be deleted once both sides
    have opened it.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

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
        _FORMAT.pack_into(self._memory, 0, now, progress, steps)

    def read(self) -> tuple[float, float, int]:
        """Time of the last beat, of the last progress, and the number of steps so far."""
        last_beat, progress, steps = _FORMAT.unpack_from(self._memory, 0)
        return last_beat, progress, steps

    def close(self) -> None:
        """Unmap. Safe to call twice."""
        self._memory.close()
