"""Runs an output parser over a text, cut as the test wants it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from twostep.server.parsers.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolStart,
    join_events,
)
from twostep.server.parsers.formats import ToolChoice, choose_formats


def function(name: str, **parameters: Any) -> dict[str, Any]:
    """A tool as in a request; ``parameters`` are the schemas of its properties."""
    schema = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    function("weather", city={"type": "string"}, days={"type": "integer"}),
    function("ping"),
]


def parse(
    pieces: Sequence[str],
    tool_format: str = "none",
    *,
    reasoning: str = "none",
    tools: Sequence[dict[str, Any]] = TOOLS,
    choice: ToolChoice = "auto",
    starts_in_reasoning: bool = False,
    parallel: bool = True,
) -> list[Event]:
    """The joined events of an output that arrives in these pieces."""
    formats = choose_formats(None, tool_call_parser=tool_format, reasoning_parser=reasoning)
    ids = itertools.count()
    parser = formats.make(
        tools,
        choice,
        starts_in_reasoning=starts_in_reasoning,
        call_ids=lambda: f"id{next(ids)}",
        parallel_tool_calls=parallel,
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    return join_events([*events, *parser.finish()])


def summary(events: Sequence[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, answer, [(name, arguments)])."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, ToolArguments):
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    answer = "".join(event.text for event in events if isinstance(event, Text))
    return reasoning, answer, calls
