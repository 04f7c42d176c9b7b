"""``twostep serve`` as its users start it: a process of its own on a free port."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path


class ServeProcess:
    """A server and what it wrote to standard error."""

    def __init__(self, *argv: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "twostep", "serve", *argv, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)
            if "ready on" in line:
                self._ready.set()
        self._ready.set()

    @property
    def url(self) -> str:
        assert self._ready.wait(300)
        found = re.search(r"ready on (http://127\.0\.0\.1:\d+) in", "".join(self.lines))
        assert found, self.lines
        return found[1]

    def core_pids(self) -> list[int]:
        """Processes whose parent is the server, once it is ready."""
        assert self.url
        pids = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.child.pid:
                    pids.append(int(path.parent.name))
        return pids

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        self.child.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.child.wait(120)
        self._reader.join(30)
        for stream in (self.child.stdout, self.child.stderr):
            assert stream is not None
            stream.close()
        return code
