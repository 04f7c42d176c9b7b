"""Calls as JSON objects, one after the other: what hermes, Llama 3 and older Mistral models write.

<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>     hermes
{"name": "f", "parameters": {}}; {"name": "g", ...}            Llama 3
[TOOL_CALLS] [{"name": "f", "arguments": {}}, {...}]           Mistral
[{"name": "f", "arguments": {}}]                               where a model has no form of its own
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostep.server.parsers.json_call import CallObject, Outcome
from twostep.server.parsers.markers import is_cut_marker, marker_at
from twostep.server.parsers.output_parser import CallReader, CallSink


class JsonBlockReader:
    """Reads objects until the closing marker, the end of the array, or other text."""

    def __init__(
        self,
        *,
        opening: Sequence[str] = (),
        closing: Sequence[str] = (),
        between: str = ",",
        must_look_like_call: bool = False,
        inner: tuple[str, Callable[[], CallReader]] | None = None,
    ) -> None:
        """``between``: characters that may stand between objects.

        ``inner``: a marker that may stand in place of an object, and who reads on behind it.
        """
        self._opening = tuple(opening)
        self._closing = tuple(closing)
        self._markers = (*self._opening, *self._closing, *((inner[0],) if inner else ()))
        self._between = between
        self._strict = must_look_like_call
        self._inner = inner
        self._object: CallObject | None = None
        self._reader: CallReader | None = None
        self._arrays = 0
        """Open square brackets around the objects."""
        self._num_objects = 0
        self._held = ""

    def feed(self, text: str, sink: CallSink) -> str | None:
        """See CallReader."""
        rest: str | None = self._held + text
        self._held = ""
        while rest:
            if self._object is not None:
                rest, is_over = self._feed_object(self._object, rest)
            elif self._reader is not None:
                rest, is_over = self._reader.feed(rest, sink), False
                if rest is not None:
                    self._reader = None
            else:
                rest, is_over = self._read_between(rest, sink)
            if is_over:
                return rest
        return None

    def finish(self, sink: CallSink) -> str:
        """See CallReader."""
        if self._object is not None:
            return self._object.finish()
        return self._reader.finish(sink) if self._reader is not None else ""

    def _feed_object(self, call: CallObject, text: str) -> tuple[str | None, bool]:
        outcome = call.feed(text)
        if outcome is Outcome.OPEN:
            return None, False
        self._object = None
        self._num_objects += 1
        return call.unread, outcome is Outcome.NO_CALL

    def _read_between(self, text: str, sink: CallSink) -> tuple[str | None, bool]:
        """Skip to the next object; (text from there on, whether the section is over)."""
        for position, char in enumerate(text):
            if char.isspace() or (char in self._between and self._num_objects):
                continue
            marker = marker_at(text, position, self._markers)
            if marker is not None:
                return self._take_marker(marker, text[position + len(marker) :])
            if is_cut_marker(text, position, self._markers):
                self._held = text[position:]
                return None, False
            if char == "{":
                self._object = CallObject(sink, self._markers, must_look_like_call=self._strict)
                return text[position:], False
            if char == "[" and not self._num_objects:
                self._arrays += 1
            elif char == "]" and self._arrays:
                self._arrays -= 1
                if not self._arrays and not self._closing:
                    return text[position + 1 :], True
            else:
                return text[position:], True
        return None, False

    def _take_marker(self, marker: str, rest: str) -> tuple[str, bool]:
        if self._inner is not None and marker == self._inner[0]:
            self._reader = self._inner[1]()
            return rest, False
        return rest, marker in self._closing
