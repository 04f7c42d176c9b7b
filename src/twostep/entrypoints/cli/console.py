"""Reading prompts and writing answers: terminals, pipes, colours, one JSON document."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from twostep.contracts.errors import UsageError


def read_piped_prompt() -> str:
    """All of standard input as one prompt; raises UsageError if it is empty or not UTF-8."""
    try:
        raw = getattr(sys.stdin, "buffer", None)
        text = sys.stdin.read() if raw is None else raw.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8 (byte {error.start}): convert it, for example with iconv"
        ) from None
    text = text.strip("\r\n")
    if not text.strip():
        raise UsageError("no prompt: give it as an argument or on standard input")
    return text


def stdin_is_terminal() -> bool:
    """Whether a person can type."""
    return sys.stdin is not None and sys.stdin.isatty()


def print_json(document: Any) -> None:
    """The one JSON document of a ``--json`` run: one line, or indented for a person."""
    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps(document, ensure_ascii=False, indent=indent, allow_nan=False))


def dim(text: str, stream: TextIO) -> str:
    """Grey on a terminal that allows colours."""
    return f"\x1b[2m{text}\x1b[0m" if allows_colours(stream) else text


def bold(text: str, stream: TextIO) -> str:
    """Bold on a terminal that allows colours."""
    return f"\x1b[1m{text}\x1b[0m" if allows_colours(stream) else text


def allows_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose user has not asked for plain text."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Rows as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(indent + line for line in lines)


class Interrupted:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.is_set = False


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupted]:
    """Within the block the first Ctrl-C only sets a flag; the second one raises as usual.

    An exception in the middle of an engine step could leave it half done. The flag is looked at
    between steps, and the request is then aborted in the ordinary way.
    """
    flag = Interrupted()
    if threading.current_thread() is not threading.main_thread():
        yield flag  # only the main thread may set signal handlers, and gets Ctrl-C
        return

    def on_interrupt(signum: int, frame: object) -> None:
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
