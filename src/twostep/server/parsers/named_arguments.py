"""A call written as a name and JSON behind it, as newer Mistral models do.

[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]...
[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}
[TOOL_CALLS]get_weather{"city": "Paris"}
"""

from __future__ import annotations

import enum
import re

from twostep.server.parsers.json_text import ValueSpan
from twostep.server.parsers.markers import is_cut_marker, marker_at
from twostep.server.parsers.output_parser import CallSink

TOOL_CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_MARKERS = (TOOL_CALLS, ARGS, CALL_ID)
_IN_NAME = re.compile(r"[^\s\[{]+")


class _At(enum.Enum):
    NAME = enum.auto()
    ID = enum.auto()
    ARGUMENTS = enum.auto()
    """In front of them."""
    SPAN = enum.auto()


class NamedArgumentsReader:
    """Reads one call, from its name on."""

    def __init__(self) -> None:
        self._at = _At.NAME
        self._name = ""
        self._span = ValueSpan()
        self._held = ""

    def feed(self, text: str, sink: CallSink) -> str | None:
        """See CallReader."""
        text, self._held = self._held + text, ""
        position = 0
        while position < len(text):
            if self._at is _At.SPAN:
                start = position
                position = self._span.take(text, position)
                sink.arguments(text[start:position])
                if self._span.closed or position == len(text):
                    break
            marker = marker_at(text, position, _MARKERS)
            if marker is None and is_cut_marker(text, position, _MARKERS):
                self._held = text[position:]
                return None
            if marker is not None:
                if not self._take_marker(marker, sink):
                    return self._end(text[position:], sink)
                position += len(marker)
            elif not self._take_char(text[position], sink):
                return self._end(text[position:], sink)
            else:
                position += 1
        return text[position:] if self._span.closed else None

    def finish(self, sink: CallSink) -> str:
        """See CallReader."""
        return self._name if self._at is _At.NAME else ""

    def _take_marker(self, marker: str, sink: CallSink) -> bool:
        """Take a marker; False if the next call begins."""
        if marker == TOOL_CALLS or self._at is _At.SPAN:
            return False
        if self._at is _At.NAME:
            sink.start(self._name.rstrip())
        self._at = _At.ID if marker == CALL_ID else _At.ARGUMENTS
        return True

    def _take_char(self, char: str, sink: CallSink) -> bool:
        """Take a character; False if it belongs to something else."""
        if self._at is _At.SPAN:
            self._span.take_char(char)
            sink.arguments(char)
            return True
        if self._at is _At.NAME and (char.isspace() or _IN_NAME.fullmatch(self._name + char)):
            self._name += char
            return True
        if char == "{":
            if self._at is _At.NAME:
                sink.start(self._name.rstrip())
            self._at = _At.SPAN
            self._span.take_char(char)
            sink.arguments(char)
            return True
        return char.isspace() or self._at is _At.ID

    def _end(self, text: str, sink: CallSink) -> str:
        """Something else begins; what is no call is handed back."""
        if self._at is _At.NAME:
            return self._name + text
        if self._at is not _At.SPAN:
            sink.arguments("{}")
        return text
