"""One choice's output as events: answer, reasoning, tool calls, whatever the pieces it comes in.

A state machine over characters: where the text is cut changes no event but how it is cut itself.
White space between the answer and a think block or a call belongs to neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from twostep.server.parsers.events import (
    CallIds,
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolStart,
)
from twostep.server.parsers.markers import MarkerFinder


class CallSink:
    """Takes what a reader finds in a section of calls."""

    def __init__(self, call_ids: CallIds, parallel: bool) -> None:
        self._call_ids = call_ids
        self._parallel = parallel
        self.events: list[Event] = []
        self.num_calls = 0
        """Calls seen."""

    def start(self, name: str) -> None:
        """A call begins; the one before has ended."""
        self.num_calls += 1
        if self._is_told:
            self.events.append(ToolStart(self.num_calls - 1, self._call_ids(), name))

    def arguments(self, text: str) -> None:
        """More arguments of the call that has begun last."""
        if text and self._is_told:
            self.events.append(ToolArguments(self.num_calls - 1, text))

    @property
    def _is_told(self) -> bool:
        return self._parallel or self.num_calls == 1


class CallReader(Protocol):
    """Reads one section of calls."""

    def feed(self, text: str, sink: CallSink) -> str | None:
        """Take the next piece. None while the section goes on, then the text behind it.

        Text that turns out to be no call is handed back the same way.
        """
        ...

    def finish(self, sink: CallSink) -> str:
        """The text has ended; what is no call of it."""
        ...


class ToolSyntax(msgspec.Struct, frozen=True):
    """How a model writes calls."""

    opening: Sequence[str]
    """Markers that open a section of calls."""
    stray: Sequence[str]
    """Markers that mean nothing outside of a section, and are not shown."""
    bare: str
    """Characters that open a section if they are the first of the answer."""
    open: Callable[[str], CallReader]
    """Reads the section that a marker opened ("" if its first character did)."""


class ThinkTags(msgspec.Struct, frozen=True):
    """What surrounds a model's reasoning."""

    start: str
    end: str


class _Channel:
    """Text without the white space next to tags."""

    def __init__(self, make: Callable[[str], Event], *, at_edge: bool) -> None:
        self._make = make
        self._held = ""
        self._at_edge = at_edge
        """Whether nothing but white space came since the last tag."""
        self.is_empty = True

    def add(self, text: str, events: list[Event]) -> None:
        text = self._held + text
        body = text.rstrip()
        self._held = text[len(body) :]
        if not body:
            return
        if self._at_edge and self.is_empty:
            body = body.lstrip()
        self._at_edge = self.is_empty = False
        events.append(self._make(body))

    def edge(self) -> None:
        self._at_edge = True

    def finish(self, events: list[Event]) -> None:
        if self._held and not self._at_edge:
            events.append(self._make(self._held))
        self._held = ""


class OutputParser:
    """Feed it the text of one choice; it is done after ``finish``."""

    def __init__(
        self,
        *,
        tags: ThinkTags | None,
        tools: ToolSyntax | None,
        starts_in_reasoning: bool,
        call_ids: CallIds,
        parallel_tool_calls: bool = True,
    ) -> None:
        """``tags`` or ``tools`` None: that kind of markers is text like any other."""
        self._tags = tags
        self._tools = tools
        self._reasons = tags is not None and starts_in_reasoning
        self._answer = _Channel(Text, at_edge=self._reasons)
        self._reasoning = _Channel(Reasoning, at_edge=True)
        self._reader: CallReader | None = None
        self._sink = CallSink(call_ids, parallel_tool_calls)
        markers = [] if tags is None else [tags.start, tags.end]
        if tools is not None:
            markers += [*tools.opening, *tools.stray]
        self._finder = MarkerFinder(markers) if markers else None
        self._may_be_bare = bool(tools and tools.bare)
        self._is_plain = self._finder is None and not self._may_be_bare
        """Nothing is looked for."""

    def feed(self, text: str) -> list[Event]:
        """The events that ``text``, the next piece of the output, makes certain."""
        if self._is_plain:
            return [Text(text)] if text else []
        self._read(text)
        return self._take_events()

    def finish(self) -> list[Event]:
        """The events that the end of the output makes certain: what was held back."""
        while self._reader is not None:
            reader, self._reader = self._reader, None
            self._read(reader.finish(self._sink))
        if self._finder is not None:
            self._add_text(self._finder.finish())
        self._reasoning.finish(self._sink.events)
        self._answer.finish(self._sink.events)
        return self._take_events()

    def _read(self, text: str) -> None:
        rest: str | None = text
        while rest:
            rest = self._read_call(rest) if self._reader is not None else self._read_text(rest)

    def _take_events(self) -> list[Event]:
        events, self._sink.events = self._sink.events, []
        return events

    def _read_call(self, text: str) -> str | None:
        assert self._reader is not None
        num_before = self._sink.num_calls
        rest = self._reader.feed(text, self._sink)
        if self._sink.num_calls > num_before:
            self._answer.edge()
        if rest is not None:
            self._reader = None
        return rest

    def _read_text(self, text: str) -> str | None:
        """Text up to the next marker; returns what is behind it."""
        if self._may_be_bare and not self._reasons and not text.isspace():
            assert self._tools is not None
            self._may_be_bare = False
            first = text.lstrip()
            if first[0] in self._tools.bare:
                self._add_text(text[: -len(first)])
                self._reader = self._tools.open("")
                return first
        if self._finder is None:
            self._add_text(text)
            return None
        before, marker, rest = self._finder.find(text)
        if before:
            self._add_text(before)
        if marker is not None:
            self._take_marker(marker)
        return rest

    def _add_text(self, text: str) -> None:
        channel = self._reasoning if self._reasons else self._answer
        channel.add(text, self._sink.events)

    def _take_marker(self, marker: str) -> None:
        self._answer.edge()
        self._reasoning.edge()
        if self._tags is not None and marker in (self._tags.start, self._tags.end):
            self._reasons = marker == self._tags.start
            return
        assert self._tools is not None
        if marker in self._tools.opening:
            self._reasons = False
            self._may_be_bare = False
            self._reader = self._tools.open(marker)
