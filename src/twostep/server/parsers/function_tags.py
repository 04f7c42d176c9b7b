"""A call written as tags, as Qwen3-Coder does.

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

Values are plain text: the line breaks next to their tags are not part of them, and the function's
schema says what they are in JSON.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable

from twostep.server.parsers.argument_types import STRING_ONLY, ParameterTypes, json_value
from twostep.server.parsers.markers import MarkerFinder, is_cut_marker, marker_at
from twostep.server.parsers.output_parser import CallSink

FUNCTION_START = "<function="
_FUNCTION_END = "</function>"
_PARAMETER_START = "<parameter="
_PARAMETER_END = "</parameter>"
_OUTSIDE = ("<tool_call>", "</tool_call>", FUNCTION_START)
_BETWEEN = (_FUNCTION_END, _PARAMETER_START, _PARAMETER_END, *_OUTSIDE)
# A model that forgets to close a parameter still starts the next tag on a line of its own.
_VALUE_ENDS = (
    _PARAMETER_END,
    *(f"\n{tag}" for tag in (_PARAMETER_END, _PARAMETER_START, _FUNCTION_END, "</tool_call>")),
)


class _At(enum.Enum):
    NAME = enum.auto()
    BETWEEN = enum.auto()
    PARAMETER_NAME = enum.auto()
    VALUE_START = enum.auto()
    VALUE = enum.auto()


class FunctionTagsReader:
    """Reads one function, from behind ``<function=``."""

    def __init__(self, types_of: Callable[[str], ParameterTypes]) -> None:
        """``types_of``: the parameters of a function, by its name."""
        self._types_of = types_of
        self._types = ParameterTypes(None)
        self._at = _At.NAME
        self._name = ""
        self._parameter = ""
        self._value_types = STRING_ONLY
        self._value = ""
        self._finder = MarkerFinder(_VALUE_ENDS)
        self._num_parameters = 0
        self._held = ""

    def feed(self, text: str, sink: CallSink) -> str | None:
        """See CallReader."""
        rest, self._held = self._held + text, ""
        while rest:
            match self._at:
                case _At.NAME | _At.PARAMETER_NAME:
                    rest = self._read_name(rest, sink)
                case _At.VALUE_START:
                    self._at = _At.VALUE
                    rest = rest.removeprefix("\n")
                case _At.VALUE:
                    rest = self._read_value(rest, sink)
                case _At.BETWEEN:
                    rest, is_over = self._read_between(rest, sink)
                    if is_over:
                        return rest
        return None

    def finish(self, sink: CallSink) -> str:
        """See CallReader."""
        # What was held back is a tag that was cut off, or a line break in front of one.
        return self._name if self._at is _At.NAME else ""

    def _read_name(self, text: str, sink: CallSink) -> str:
        """Up to the ">" of ``<function=name>`` or ``<parameter=name>``."""
        name, bracket, rest = text.partition(">")
        if self._at is _At.NAME:
            self._name += name
            if bracket:
                self._name = self._name.strip()
                self._types = self._types_of(self._name)
                sink.start(self._name)
                self._at = _At.BETWEEN
        else:
            self._parameter += name
            if bracket:
                self._start_parameter(sink)
        return rest

    def _read_between(self, text: str, sink: CallSink) -> tuple[str, bool]:
        """To the next parameter; (text from there on, whether the function has ended)."""
        position = len(text) - len(text.lstrip())
        if position == len(text):
            return "", False
        marker = marker_at(text, position, _BETWEEN)
        if marker is None and is_cut_marker(text, position, _BETWEEN):
            self._held = text[position:]
            return "", False
        if marker == _PARAMETER_START:
            self._at = _At.PARAMETER_NAME
            self._parameter = ""
        elif marker != _PARAMETER_END:
            sink.arguments("}" if self._num_parameters else "{}")
            return text[position + len(_FUNCTION_END if marker == _FUNCTION_END else "") :], True
        return text[position + len(marker) :], False

    def _start_parameter(self, sink: CallSink) -> None:
        self._parameter = self._parameter.strip()
        self._value_types = self._types.of(self._parameter)
        self._value = ""
        self._at = _At.VALUE_START
        if self._value_types == STRING_ONLY:
            self._tell_key(sink)
            sink.arguments('"')

    def _read_value(self, text: str, sink: CallSink) -> str:
        before, marker, rest = self._finder.find(text)
        if self._value_types == STRING_ONLY:
            sink.arguments(json.dumps(before, ensure_ascii=False)[1:-1])
        else:
            self._value += before
        if marker is None:
            return rest
        if self._value_types == STRING_ONLY:
            sink.arguments('"')
        else:
            self._tell_key(sink)
            sink.arguments(json_value(self._value, self._value_types))
        self._at = _At.BETWEEN
        return rest if marker.endswith(_PARAMETER_END) else marker.lstrip("\n") + rest

    def _tell_key(self, sink: CallSink) -> None:
        separator = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        sink.arguments(f"{separator}{json.dumps(self._parameter, ensure_ascii=False)}: ")
