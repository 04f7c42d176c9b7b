"""Other programs: started in a group of their own, paused while another engine is measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]


def memory_mb(pid: int, field: str) -> float | None:
    """A field of a process's status, as VmRSS or VmHWM, in MB; None if it has none any more."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    return None


class ProgramError(Exception):
    """A program failed; one line."""


class Program:
    """A running program with its children. Standard error goes to a file that errors quote."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        piped: bool = False,
    ) -> None:
        self.command = list(command)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        self._words = ""
        pipe = subprocess.PIPE if piped else None
        self.popen = subprocess.Popen(
            self.command,
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or self._log,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
            cwd=ROOT,
            start_new_session=True,
        )

    def pause(self) -> None:
        """Stop it and its children: an engine that waits its turn must cost nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def peak_rss_mb(self) -> float:
        """Most memory that the program itself has held, file pages included, in MB."""
        peak = memory_mb(self.popen.pid, "VmHWM")
        if peak is None:
            raise ProgramError(f"{self.command[0]} has ended: {self.last_words()}")
        return peak

    def check_alive(self) -> None:
        """Raise ProgramError if it has ended."""
        if self.popen.poll() is not None:
            raise ProgramError(
                f"{Path(self.command[0]).name} ended with {self.popen.returncode}: "
                f"{self.last_words()}"
            )

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        if not self._log.closed:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            self._words = " | ".join(lines[-4:]) or "(it said nothing)"
        return self._words

    def kill(self) -> None:
        """End it and its children."""
        self._signal(signal.SIGKILL)
        self.popen.wait()
        self.last_words()
        for stream in (self.popen.stdin, self.popen.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a program that runs to its end. Raises ProgramError if it fails."""
    done = subprocess.run(
        list(command),
        env={**os.environ, **(environment or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = " | ".join(done.stderr.strip().splitlines()[-4:])
        raise ProgramError(f"{Path(command[0]).name} ended with {done.returncode}: {words}")
    return done.stdout


def first_output(
    command: Sequence[str], clock: Any, environment: Mapping[str, str] | None = None
) -> tuple[float, float]:
    """(seconds to the first byte of standard output, peak memory in MB until then) of a program.

    The peak is asked of the living process: what a parent is told of an ended one (``ru_maxrss``)
    includes what the parent itself held when it made it.
    """
    started = clock()
    program = Program(command, environment, piped=True)
    try:
        assert program.popen.stdout is not None
        byte = program.popen.stdout.read(1)
        seconds = clock() - started
        peak = memory_mb(program.popen.pid, "VmHWM")
        program.popen.stdout.read()
        if program.popen.wait() != 0 or not byte:
            program.check_alive()
            raise ProgramError(f"{command[0]} printed nothing")
        if peak is None:
            raise ProgramError(f"{command[0]} ended before its memory could be read")
        return seconds, peak
    finally:
        program.kill()
