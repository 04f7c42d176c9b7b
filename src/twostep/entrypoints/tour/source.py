"""Where a function is: asked of the function itself, so that it can't go stale."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A function of ours."""

    file: str
    """From the root of the repository."""
    function: str
    """With its class."""
    line: int

    @property
    def short(self) -> str:
        """``engine/core.py: EngineCore.step``, without the folder that all of them share."""
        return f"{self.file.removeprefix('src/twostep/')}: {self.function}"

    @property
    def with_line(self) -> str:
        """``engine/core.py:118: EngineCore.step``."""
        return f"{self.file.removeprefix('src/twostep/')}:{self.line}: {self.function}"


def place(function: Callable[..., Any]) -> Place:
    """Where a function or a bound method was written."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    return Place(
        file=f"src/{function.__module__.replace('.', '/')}.py",
        function=function.__qualname__,
        line=function.__code__.co_firstlineno,
    )
