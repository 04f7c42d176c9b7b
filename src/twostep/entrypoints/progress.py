"""Telling a person how far a long job has got: a bar on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO


class Reporter(Protocol):
    """Where progress goes."""

    def note(self, text: str) -> None:
        """One line of news."""
        ...

    def transfer(self, label: str, total_bytes: int) -> contextlib.AbstractContextManager[Advance]:
        """A transfer of known size; call the value with the bytes done so far."""
        ...

    def count(
        self, label: str, total: int, unit: str
    ) -> contextlib.AbstractContextManager[Advance]:
        """Work of known size; call the value with the units done so far."""
        ...


Advance = Callable[[int], None]
"""Takes what is done so far, in bytes or units (not the increment)."""


class Silent:
    """Says nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    @contextlib.contextmanager
    def transfer(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """Show nothing."""
        yield lambda done: None

    @contextlib.contextmanager
    def count(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        """Show nothing."""
        yield lambda done: None


class Lines:
    """Plain lines, for logs and pipes: a transfer says when it starts and at each quarter."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        """Print one line."""
        print(text, file=self._stream, flush=True)

    @contextlib.contextmanager
    def transfer(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """Print the start and each quarter."""
        self.note(f"{label} ({format_bytes(total_bytes)})")
        yield self._quarters(label, total_bytes)

    @contextlib.contextmanager
    def count(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        """Print the start and each quarter."""
        self.note(f"{label} ({total} {unit})")
        yield self._quarters(label, total)

    def _quarters(self, label: str, total: int) -> Advance:
        quarters_told = 0

        def advance(done: int) -> None:
            nonlocal quarters_told
            quarters = 4 * min(done, total) // max(total, 1)
            if quarters > quarters_told:
                quarters_told = quarters
                self.note(f"{label}: {25 * quarters} %")

        return advance


class Bar:
    """A bar that redraws itself, for a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        """Print one line."""
        print(text, file=self._stream, flush=True)

    @contextlib.contextmanager
    def transfer(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """Draw a bar with speed and time left."""
        with self._bar(desc=label, total=total_bytes, unit="B", unit_scale=True) as advance:
            yield advance

    @contextlib.contextmanager
    def count(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        """Draw a bar with speed and time left."""
        with self._bar(desc=label, total=total, unit=f" {unit}") as advance:
            yield advance

    @contextlib.contextmanager
    def _bar(self, *, total: int, **options: Any) -> Iterator[Advance]:
        from tqdm import tqdm

        with tqdm(total=total, file=self._stream, **options) as bar:
            yield lambda done: bar.update(min(done, total) - bar.n)


def reporter_for(stream: TextIO | None = None) -> Reporter:
    """A bar if the stream (standard error by default) is a terminal, else plain lines."""
    stream = sys.stderr if stream is None else stream
    return Bar(stream) if stream.isatty() else Lines(stream)


@contextlib.contextmanager
def watch_folder(folder: Path, advance: Advance, seconds: float = 0.2) -> Iterator[None]:
    """Report the bytes of all files under ``folder`` while another program fills it.

    This is how downloads by tools that own their output (pip) still get our bar.
    """
    stop = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(folder, advance, stop, seconds), name="twostep-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(folder: Path, advance: Advance, stop: threading.Event, seconds: float) -> None:
    most = 0
    while not stop.wait(seconds):
        most = max(most, folder_bytes(folder))
        advance(most)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files under a folder that others are writing to; what vanishes counts 0."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are gone by their turn
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def format_bytes(count: float) -> str:
    """For people: 98.4 MB, 1.2 GB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
