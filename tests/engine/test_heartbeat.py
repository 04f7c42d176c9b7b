"""Signs of life in shared memory."""

from __future__ import annotations

import subprocess
import sys
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


WRITER = """
import sys, time
import subprocess
import sys
from pathlib import Path
from twostep.engine.heartbeat import Heartbeat
heartbeat = Heartbeat.open(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    heartbeat.beat(7.0, 5.0, 3)
"""


def test_a_reader_never_sees_half_a_beat(tmp_path: Path) -> None:
    """A beat was cleared before it was written, so a live engine looked stalled at times."""
    heartbeat = Heartbeat.create(tmp_path / "h", 7.0)
    heartbeat.beat(7.0, 5.0, 3)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "h")], stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        seen = {heartbeat.read() for _ in range(200_000)}
    finally:
        writer.kill()
        writer.communicate()
    assert seen == {(7.0, 5.0, 3)}
