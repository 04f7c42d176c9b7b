"""The engine core's process, as its parent sees it: started, watched, ended, cleaned up after."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from twostep.engine.frames import FrameSocket
from twostep.engine.heartbeat import Heartbeat


class CoreProcess:
    """A child process, and the two things it shares with us.

    ``heartbeat`` is memory that the child writes to. ``wire`` is one end of a socket pair: when
    either process dies, however that happens, the other one reads the end of file. Neither has a
    name on disk: nobody else can open them, and nothing is left when both processes are killed.
    """

    def __init__(self, command: Callable[[int, int], Sequence[str]]) -> None:
        """Start ``command(wire, heartbeat)``, which are file descriptors for the child.

        The child reads nothing and writes what it has to say to standard error. Call this on a
        thread that lives on: the child is killed when the thread that started it ends.
        """
        self._child: subprocess.Popen[bytes] | None = None
        ours, theirs = socket.socketpair()
        self.wire = FrameSocket(ours)
        try:
            with theirs, _shared_heartbeat() as (self.heartbeat, memory):
                self._child = subprocess.Popen(
                    command(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), memory],
                )
        except BaseException:
            self.wire.close()
            raise

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

    def close(self) -> None:
        """Free what is shared, after the child has ended. Safe to call twice."""
        self.wire.close()
        self.heartbeat.close()


@contextlib.contextmanager
def _shared_heartbeat() -> Iterator[tuple[Heartbeat, int]]:
    """A new one, and while the child is started, a descriptor of its memory."""
    heartbeat, memory = Heartbeat.create(time.monotonic())
    try:
        yield heartbeat, memory
    finally:
        os.close(memory)


def _has_fileno(stream: object) -> bool:
    """Notebooks and test runners replace standard streams by objects without a descriptor."""
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined,no-any-return]
    except (AttributeError, OSError, ValueError):
        return False
