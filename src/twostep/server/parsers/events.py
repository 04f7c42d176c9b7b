"""What an output parser tells, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec


class Text(msgspec.Struct, frozen=True):
    """A piece of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of what the model thinks before it answers."""

    text: str


class ToolStart(msgspec.Struct, frozen=True):
    """The model calls a function; told once for each call."""

    index: int
    """Counts the calls of one answer, from 0."""
    id: str
    name: str
    """As the model wrote it; nobody checked that there is such a function."""


class ToolArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments: JSON text as the model wrote it, valid or not."""

    index: int
    text: str


Event = Text | Reasoning | ToolStart | ToolArguments

CallIds = Callable[[], str]
"""Makes the id of the next call."""


def join_events(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind as one event: the same list however the text was cut."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ToolArguments):
            if isinstance(last, ToolArguments) and last.index == event.index:
                joined[-1] = ToolArguments(event.index, last.text + event.text)
                continue
        elif isinstance(event, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + event.text)
            continue
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
            continue
        joined.append(event)
    return joined
