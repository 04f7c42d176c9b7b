"""The engine core's process, as its parent sees it: started, watched, ended, cleaned up after."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from twostep.engine.heartbeat import HEARTBEAT_FILE, Heartbeat

MAX_SOCKET_PATH = 100
"""Bytes; the system's own limit for the path of a socket is a little above."""


class CoreProcess:
    """A child process, and the three things it shares with us.

    ``directory``, which only this user can enter, holds the sockets until both sides have them.
    ``heartbeat`` is memory that the child writes to. ``tie`` is one end of a socket pair: when
    either process dies, however that happens, the other one reads the end of file.
    """

    def __init__(self, command: Callable[[str, int], Sequence[str]]) -> None:
        """Start ``command(directory, tie file descriptor)``.

        The child reads nothing and writes what it has to say to standard error. Call this on a
        thread that lives on: the child is killed when the thread that started it ends.
        """
        self.directory = make_private_directory()
        self._child: subprocess.Popen[bytes] | None = None
        self.tie, theirs = socket.socketpair()
        try:
            self.heartbeat = Heartbeat.create(self.directory / HEARTBEAT_FILE, time.monotonic())
            with theirs:
                self._child = subprocess.Popen(
                    command(str(self.directory), theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        except BaseException:
            self.tie.close()
            self.remove_directory()
            raise
        self.tie.setblocking(False)

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._child is not None
        return self._child.pid

    def has_ended(self) -> bool:
        """Whether the child has ended; never waits."""
        assert self._child is not None
        return self._child.poll() is not None

    def exit_words(self) -> str:
        """How the child ended, in words; empty while it runs."""
        assert self._child is not None
        code = self._child.poll()
        if code is None:
            return ""
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    def kill(self) -> None:
        """End it now, whatever it does."""
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()

    def abandon(self) -> None:
        """End it before anybody has talked to it."""
        self.kill()
        assert self._child is not None
        self._child.wait()
        self.close()

    def remove_directory(self) -> None:
        """Both sides have opened what lies there, or never will. Safe to call twice."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Free what is shared, after the child has ended. Safe to call twice."""
        self.tie.close()
        self.heartbeat.close()
        self.remove_directory()


def make_private_directory() -> Path:
    """A new folder for sockets, of mode 0700, whose path is short enough for them."""
    for parent in (None, "/tmp"):
        directory = Path(tempfile.mkdtemp(prefix="twostep-", dir=parent))
        if len(os.fsencode(directory)) + len("/out") <= MAX_SOCKET_PATH:
            return directory
        directory.rmdir()
    raise OSError(f"no folder with a path short enough for a socket: set TMPDIR ({directory})")


def _has_fileno(stream: object) -> bool:
    """Notebooks and test runners replace standard streams by objects without a descriptor."""
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined,no-any-return]
    except (AttributeError, OSError, ValueError):
        return False
