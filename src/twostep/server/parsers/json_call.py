"""A call written as a JSON object: ``{"name": "f", "arguments": {...}}``, in any order of keys.

Models write what is nearly JSON. Read on as long as it is clear what is meant: single quotes and
no quotes around keys, ``parameters`` for ``arguments``, ``function`` for ``name`` or around both,
arguments as a string of JSON, brackets that are missing before the closing marker.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence

from twostep.server.parsers.json_text import StringDecoder, ValueSpan
from twostep.server.parsers.markers import is_cut_marker, marker_at
from twostep.server.parsers.output_parser import CallSink

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_KNOWN_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id")
_SCALAR_STOP = re.compile(r"[,}\]\s<\[]")
_BARE_KEY = re.compile(r"[^\s:\"'{}\[\],<]+")


class Outcome(enum.Enum):
    """How far an object is."""

    OPEN = enum.auto()
    CLOSED = enum.auto()
    NO_CALL = enum.auto()
    """It is an object of another kind; nothing was told of it."""


class _At(enum.Enum):
    KEY = enum.auto()
    """Between an object's entries."""
    KEY_TEXT = enum.auto()
    BARE_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    """In front of a value."""
    NAME = enum.auto()
    ARGUMENTS_TEXT = enum.auto()
    """In a string that holds the arguments."""
    ARGUMENTS_SPAN = enum.auto()
    OTHER_TEXT = enum.auto()
    OTHER_SPAN = enum.auto()
    SCALAR = enum.auto()


class CallObject:
    """Reads one object, from its opening brace on, and tells the call as it becomes known."""

    def __init__(self, sink: CallSink, enders: Sequence[str], *, must_look_like_call: bool) -> None:
        """``enders``: markers that end the object outside of strings, complete or not.

        ``must_look_like_call``: nothing announced a call, so only an object that has a name and
        arguments, and no other keys before them, is one.
        """
        self.outcome = Outcome.OPEN
        self._sink = sink
        self._enders = tuple(enders)
        self._strict = must_look_like_call
        self._at = _At.KEY
        self._depth = 0
        """Open braces: 2 inside of ``"function": {``."""
        self._key = ""
        self._name: str | None = None
        self._started = False
        self._has_arguments = False
        self._early = ""
        """Arguments that came before the name."""
        self._scalar = ""
        self._scalar_is_arguments = False
        self._decoder = StringDecoder()
        self._span = ValueSpan()
        self._text = ""
        """Not read yet: too little of it is known."""
        self._raw: list[str] = []
        """All read so far, until the call is certain."""

    @property
    def unread(self) -> str:
        """What is behind the object, or (if it is no call) the object and what is behind it."""
        return "".join(self._raw) + self._text if self.outcome is Outcome.NO_CALL else self._text

    def feed(self, text: str) -> Outcome:
        """Take the next piece."""
        text = self._text + text
        position = 0
        while self.outcome is Outcome.OPEN and position < len(text):
            moved, held = self._step(text, position)
            position = moved
            if held:
                break
        if not self._started:
            self._raw.append(text[:position])
        self._text = text[position:]
        return self.outcome

    def finish(self) -> str:
        """The text has ended: what is no call of it."""
        if self._started:
            return ""
        return "".join(self._raw) + self._text

    # ---------------------------------------------------------------- one step

    def _step(self, text: str, position: int) -> tuple[int, bool]:
        """Read something; (new position, whether more text is needed to go on)."""
        at = self._at
        if at is _At.NAME or at is _At.KEY_TEXT or at is _At.OTHER_TEXT:
            return self._read_string(text, position), False
        if at is _At.ARGUMENTS_TEXT:
            piece, position = self._decoder.decode(text, position)
            self._tell_arguments(piece)
            if self._decoder.closed:
                self._at = _At.KEY
            return position, False
        if at is _At.ARGUMENTS_SPAN or at is _At.OTHER_SPAN:
            return self._read_span(text, position)
        if marker_at(text, position, self._enders):
            self._close()
            return position, False
        if is_cut_marker(text, position, self._enders):
            return position, True
        if at is _At.BARE_KEY:
            return self._read_bare_key(text, position), False
        if at is _At.SCALAR:
            return self._read_scalar(text, position), False
        return self._read_between(text, position), False

    def _read_between(self, text: str, position: int) -> int:
        char = text[position]
        if char.isspace():
            return position + 1
        if self._at is _At.VALUE:
            return self._begin_value(char, position)
        if self._at is _At.COLON:
            self._at = _At.VALUE if char == ":" else _At.KEY
            return position + 1 if char == ":" else position
        if char in "\"'":
            self._key = ""
            self._decoder = StringDecoder(char)
            self._at = _At.KEY_TEXT
            return position + 1
        if char == "{":
            self._depth += 1
        elif char == "}":
            self._depth -= 1
            if self._depth <= 0:
                self._close()
        elif _BARE_KEY.match(char):
            self._key = ""
            self._at = _At.BARE_KEY
            return position
        return position + 1

    def _read_bare_key(self, text: str, position: int) -> int:
        match = _BARE_KEY.match(text, position)
        if match:
            self._key += match.group()
            position = match.end()
        if position < len(text):
            self._end_key()
        return position

    def _end_key(self) -> None:
        self._at = _At.COLON
        if self._strict and not self._started and self._key not in _KNOWN_KEYS:
            self.outcome = Outcome.NO_CALL

    def _begin_value(self, char: str, position: int) -> int:
        is_name = self._key in _NAME_KEYS and self._name is None
        is_arguments = self._key in _ARGUMENT_KEYS and not self._has_arguments
        if is_arguments:
            self._has_arguments = True
            self._start_if_known()
        if char == "{" and self._key == "function" and is_name:
            self._depth += 1
            self._at = _At.KEY
            return position + 1
        if char in "{[":
            self._span = ValueSpan()
            self._at = _At.ARGUMENTS_SPAN if is_arguments else _At.OTHER_SPAN
            return position
        self._scalar = ""
        if char in "\"'":
            self._decoder = StringDecoder(char)
            if is_arguments:
                self._at = _At.ARGUMENTS_TEXT
            else:
                self._at = _At.NAME if is_name else _At.OTHER_TEXT
            return position + 1
        self._scalar_is_arguments = is_arguments
        self._at = _At.SCALAR
        return position

    # ---------------------------------------------------------------- values

    def _read_string(self, text: str, position: int) -> int:
        piece, position = self._decoder.decode(text, position)
        if self._at is _At.KEY_TEXT:
            self._key += piece
        else:
            self._scalar += piece
        if self._decoder.closed:
            if self._at is _At.KEY_TEXT:
                self._end_key()
                return position
            if self._at is _At.NAME:
                self._name = self._scalar
                self._start_if_known()
            self._at = _At.KEY
            self._scalar = ""
        return position

    def _read_span(self, text: str, position: int) -> tuple[int, bool]:
        start = position
        while not self._span.closed:
            position = self._span.take(text, position)
            if self._span.closed or position == len(text):
                break
            # A "<" or "[" outside of strings.
            if marker_at(text, position, self._enders):
                self._tell_span(text[start:position])
                self._close()
                return position, False
            if is_cut_marker(text, position, self._enders):
                self._tell_span(text[start:position])
                return position, True
            self._span.take_char(text[position])
            position += 1
        self._tell_span(text[start:position])
        if self._span.closed:
            self._at = _At.KEY
        return position, False

    def _tell_span(self, text: str) -> None:
        if self._at is _At.ARGUMENTS_SPAN:
            self._tell_arguments(text)

    def _read_scalar(self, text: str, position: int) -> int:
        stop = _SCALAR_STOP.search(text, position)
        if stop and stop.group() not in "<[":
            self._scalar += text[position : stop.start()]
            self._end_scalar()
            return stop.start()
        # In front of a marker, perhaps; if one stood here already, it would have been seen.
        end = max(stop.start(), position + 1) if stop else len(text)
        self._scalar += text[position:end]
        return end

    def _end_scalar(self) -> None:
        if self._scalar_is_arguments:
            self._tell_arguments("{}" if self._scalar in ("", "null") else self._scalar)
        self._scalar = ""
        self._at = _At.KEY

    # ---------------------------------------------------------------- what is told

    def _start_if_known(self) -> None:
        if self._name and not self._started and (self._has_arguments or not self._strict):
            self._started = True
            self._raw = []
            self._sink.start(self._name)
            self._tell_arguments(self._early)
            self._early = ""

    def _tell_arguments(self, text: str) -> None:
        if self._started:
            self._sink.arguments(text)
        else:
            self._early += text

    def _close(self) -> None:
        if self._at is _At.SCALAR:
            self._end_scalar()
        if not self._started:
            self.outcome = Outcome.NO_CALL
            return
        if not self._has_arguments:
            self._sink.arguments("{}")
        self.outcome = Outcome.CLOSED
