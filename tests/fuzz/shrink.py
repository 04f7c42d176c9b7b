"""From a request that breaks something to a small one that still does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from fuzz.cases import Case, slots

MAX_TRIES = 150


async def shrink(case: Case, breaks: Callable[[Case], Awaitable[bool]]) -> Case:
    """The smallest case found in ``MAX_TRIES`` requests that still breaks."""
    tries = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if tries == MAX_TRIES:
                return case
            tries += 1
            if await breaks(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with less in them, boldest first."""
    if case.how == "chunked":
        yield dataclasses.replace(case, how="whole")
    for i in range(len(case.headers)):
        yield dataclasses.replace(case, headers=case.headers[:i] + case.headers[i + 1 :])
    try:
        tree = json.loads(case.body)
    except (ValueError, RecursionError):
        yield from (dataclasses.replace(case, body=body) for body in _less_bytes(case.body))
        return
    size = len(case.body)
    for smaller in _less_tree(tree):
        body = json.dumps(smaller, ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(body) < size:
            yield dataclasses.replace(case, body=body)


def _less_bytes(body: bytes) -> Iterator[bytes]:
    step = len(body) // 2
    while step:
        for at in range(0, len(body), step):
            yield body[:at] + body[at + step :]
        step //= 2


def _less_tree(tree: Any) -> Iterator[Any]:
    count = sum(1 for _ in slots(tree))
    for number in range(count):
        for change in range(2):
            copy = json.loads(json.dumps(tree))
            container, key = list(slots(copy))[number]
            if change == 0:
                del container[key]
            else:
                container[key] = _simple(container[key])
            yield copy


def _simple(value: Any) -> Any:
    match value:
        case str():
            return value[: len(value) // 2]
        case list():
            return value[: len(value) // 2]
        case dict():
            return {}
        case bool() | None:
            return value
        case _:
            return 0
