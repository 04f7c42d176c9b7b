"""Signs of life in shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostep.engine.heartbeat import Heartbeat


def test_what_one_side_writes_the_other_reads_even_if_the_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    ours = Heartbeat.create(path, 5.0)
    theirs = Heartbeat.open(path)
    path.unlink()
    assert ours.read() == (5.0, 5.0, 0)
    theirs.beat(7.5, 6.25, 2**40)
    assert ours.read() == (7.5, 6.25, 2**40)
    ours.close()
    ours.close()
    theirs.close()


def test_an_old_file_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    path.write_bytes(b"")
    with pytest.raises(FileExistsError):
        Heartbeat.create(path, 0.0)
