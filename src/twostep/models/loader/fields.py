"""Typed look-ups in a model's configuration, with errors that name file and field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostep.models.loader.errors import corrupt

REQUIRED: Any = object()
"""Default of a field that must be there."""

MAX_INTEGER = 1 << 30


class Fields:
    """A table of settings out of a file that may be wrong.

    A field that is absent or null takes its default, or is an error if that is ``REQUIRED``.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self.values.get(self.prefix + name)

    def wrong(self, name: str, problem: str) -> Exception:
        """The error for a bad value of ``name``."""
        return corrupt(self.path, self.prefix + name, problem)

    def integer(self, name: str, default: Any = REQUIRED, *, low: int = 1) -> int:
        """A whole number of at least ``low``."""
        value = self._value(name, default)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not low <= value <= MAX_INTEGER:
            raise self.wrong(name, f"{value!r} is not a whole number of at least {low}")
        return int(value)

    def number(self, name: str, default: Any = REQUIRED, *, positive: bool = True) -> float:
        """A finite number, above 0 unless ``positive`` is false."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"{value!r} is not a number")
        if not -1e30 < value < 1e30 or not math.isfinite(value) or (positive and value <= 0):
            raise self.wrong(name, f"{value!r} is out of range")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number above 0, or None."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, f"{value!r} is not true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, f"{value!r} is not text")
        return value

    def table(self, name: str) -> Fields | None:
        """A nested table, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, f"{value!r} is not a table")
        return Fields(self.path, value)

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.wrong(name, "is missing")
        return default
