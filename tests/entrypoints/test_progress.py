"""Progress on terminals and in logs."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from twostep.entrypoints.progress import (
    Bar,
    Lines,
    Silent,
    folder_bytes,
    format_bytes,
    reporter_for,
    watch_folder,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_for_logs() -> None:
    out = io.StringIO()
    reporter = reporter_for(out)
    assert isinstance(reporter, Lines)
    with reporter.transfer("x", 1000) as advance:
        for done in (0, 100, 300, 310, 1000, 1000):
            advance(done)
    assert out.getvalue().splitlines() == ["x (1.0 kB)", "x: 25 %", "x: 100 %"]


def test_bar_for_terminals() -> None:
    out = Terminal()
    reporter = reporter_for(out)
    assert isinstance(reporter, Bar)
    reporter.note("hello")
    with reporter.transfer("model", 1000) as advance:
        advance(500)
        advance(2000)  # more than expected must not draw past the end
    assert "hello" in out.getvalue()
    assert "100%" in out.getvalue()


def test_silent() -> None:
    with Silent().transfer("x", 10) as advance:
        advance(5)


def test_empty_transfer() -> None:
    with Lines(io.StringIO()).transfer("x", 0) as advance:
        advance(0)


def test_watch_folder_ends_with_its_block(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    seen: list[int] = []
    with watch_folder(tmp_path, seen.append, seconds=0.001):
        while not seen:
            pass
    assert set(seen) == {5}
    assert all(thread.name != "twostep-progress" for thread in threading.enumerate())


def test_folder_bytes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"123")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert folder_bytes(tmp_path / "missing") == 0
    assert folder_bytes(tmp_path) >= 3


def test_folder_that_vanishes_while_it_is_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip removed its folder between our look at the parent and at it: the bar's thread died."""
    (tmp_path / "a").write_bytes(b"12345")
    unpacked = tmp_path / "pip-unpack-x"
    unpacked.mkdir()
    scandir = os.scandir

    def just_too_late(path: Any = ".") -> Any:
        if Path(path) == unpacked:
            unpacked.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", just_too_late)
    assert folder_bytes(tmp_path) == 5
    assert not unpacked.exists()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (2.5e9, "2.5 GB"),
        (3e12, "3.0 TB"),
    ],
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text
