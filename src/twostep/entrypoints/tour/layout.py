"""Data laid out for people: short forms of long lists, aligned names, tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from twostep.entrypoints.cli.console import table

SHORTEST_RUN = 4
"""Consecutive numbers from this many on are written as first..last."""
MOST_ITEMS = 16
"""Of a list with more of them only the first three and the last are written, and how many."""


def show(value: Any) -> str:
    """A value on one line; consecutive numbers as ``first..last``."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        size = f" ({len(value)})" if len(value) > MOST_ITEMS else ""
        return "[" + ", ".join(_items(value)) + "]" + size
    return str(value)


def _items(values: Sequence[Any]) -> list[str]:
    items = list(_runs(values))
    if len(items) > MOST_ITEMS:
        items[3:-1] = ["..."]
    return items


def _runs(values: Sequence[Any]) -> Iterator[str]:
    start = 0
    while start < len(values):
        end = start + 1
        if type(values[start]) is int:
            while end < len(values) and values[end] == values[end - 1] + 1:
                end += 1
        if end - start >= SHORTEST_RUN:
            yield f"{values[start]}..{values[end - 1]}"
        else:
            yield from map(show, values[start:end])
        start = end


def block(data: dict[str, Any], width: int, indent: str = "") -> list[str]:
    """Names and values, one a line; what does not fit goes below its name.

    A list of records is a table; records that are too wide get a line for each field.
    """
    lines: list[str] = []
    name_width = max((len(name) for name, item in data.items() if not is_table(item)), default=0)
    for name, value in data.items():
        below = indent + "  "
        line = f"{indent}{name:<{name_width}}  {show(value)}"
        if is_table(value):
            lines += [indent + name, *records(value, width, below)]
        elif len(line) <= width:
            lines.append(line)
        elif isinstance(value, dict):
            lines += [indent + name, *block(value, width, below)]
        else:
            lines += [indent + name, *wrap(show(value), width, below)]
    return lines


def is_table(value: Any) -> bool:
    """Whether a value is a list of records with the same fields."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and item.keys() == value[0].keys() for item in value)
    )


def records(rows: Sequence[dict[str, Any]], width: int, indent: str = "") -> list[str]:
    """Records as a table with a head line, or one after the other."""
    head = [name.replace("_", " ") for name in rows[0]]
    cells = [["-" if item is None else show(item) for item in row.values()] for row in rows]
    lines = table([head, *cells], indent).splitlines()
    if max(map(len, lines)) <= width:
        return lines
    return [line for row in rows for line in block(row, width, indent)]


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """A paragraph, word by word."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
