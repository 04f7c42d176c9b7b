"""Signs of life in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

from twostep.engine.heartbeat import Heartbeat


def test_what_one_side_writes_the_other_reads() -> None:
    ours, fd = Heartbeat.create(5.0)
    theirs = Heartbeat(fd)
    os.close(fd)
    assert ours.read() == (5.0, 5.0, 0)
    theirs.beat(7.5, 6.25, 2**40)
    assert ours.read() == (7.5, 6.25, 2**40)
    ours.close()
    ours.close()
    theirs.close()


WRITER = """
import sys, time
import subprocess
import sys
from twostep.engine.heartbeat import Heartbeat
heartbeat = Heartbeat(int(sys.argv[1]))
print("ready", flush=True)
while True:
    heartbeat.beat(7.0, 5.0, 3)
"""


def test_a_reader_never_sees_half_a_beat() -> None:
    """A beat was cleared before it was written, so a live engine looked stalled at times."""
    heartbeat, fd = Heartbeat.create(7.0)
    heartbeat.beat(7.0, 5.0, 3)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(fd)], stdout=subprocess.PIPE, pass_fds=[fd]
    )
    os.close(fd)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        seen = {heartbeat.read() for _ in range(200_000)}
    finally:
        writer.kill()
        writer.communicate()
    assert seen == {(7.0, 5.0, 3)}
