"""A file in memory, read-only, without reading it first."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twostep.contracts.errors import ModelFileError
from twostep.models.loader.errors import truncated


class MappedFile:
    """The bytes of a file as a read-only memory map.

    Raises:
        ModelFileError: The file cannot be opened, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise truncated(path, "header", 8, 0)
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(
                f"{path}: cannot be read ({error.strerror or error}); check the path and its rights"
            ) from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def buffer(self) -> mmap.mmap:
        """The map itself, for ``struct``."""
        if self._map is None:
            raise ValueError(f"{self.path} was closed")
        return self._map

    def release(self, start: int, nbytes: int) -> None:
        """Take these bytes out of resident memory; whoever reads them again gets them again."""
        if self._map is None or nbytes == 0 or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)

    def close(self) -> None:
        """Unmap, or leave that to the last view that is still in use."""
        if self._map is None:
            return
        self.bytes = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        self._map = None
