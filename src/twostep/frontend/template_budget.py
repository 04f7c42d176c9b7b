"""What one rendering of a chat template may spend: operations, time, and the size of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from twostep.config.limits import Limits

_MAX_WIDTH = 256
"""Widest padding or indentation, highest precision."""
_MAX_INT_BITS = 4096
_NODES_PER_OPERATION = 16
"""Measuring this many parts of a value counts as one operation."""
_NODE_SIZE = 8
"""Characters that each part of a value counts for beside its text."""
_NODES_PER_LOOK = 16384
"""So many parts are measured between two looks at the clock."""
_WRITTEN_FACTOR = 8
"""Text may be written this many times the cap in all: captured, passed on, written again."""

_REFUSED_METHODS = frozenset({"format", "format_map", "translate"})
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_NUMBER_FILTERS = frozenset({"indent", "batch", "slice", "round"})
TEXT_FILTERS = frozenset(
    {"string", "trim", "upper", "lower", "capitalize", "title", "replace", "indent", "escape"}
    | {"e", "safe", "wordcount", "join"}
)
"""Filters that write their input out."""


class BudgetError(TemplateError):
    """The template wants more time or room than a rendering may have."""


class Budget:
    """Counts down during one rendering; every method raises BudgetError at the end of it.

    Sizes are measured before an operation that could multiply them in one step, and of every
    value that is made: values that share parts can be exponentially longer written out than held
    in memory, so nothing larger than the cap may come to be.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._operations = limits.max_template_operations
        self._deadline = clock() + limits.max_template_seconds
        self._cap = limits.max_template_output_bytes
        self._written = 0

    def spend(self, operations: int = 1) -> None:
        """Pay for work."""
        self._operations -= operations
        if self._operations < 0:
            raise BudgetError(
                f"the template does not end: more than {self._limits.max_template_operations} "
                "operations"
            )
        if self._clock() > self._deadline:
            raise BudgetError(
                f"the template took longer than {self._limits.max_template_seconds} s"
            )

    def write(self, size: int) -> None:
        """Pay for text written anywhere: to the prompt, or captured by a block or macro."""
        self._written += size
        if self._written > _WRITTEN_FACTOR * self._cap:
            raise BudgetError(self._too_long())

    def check_size(self, size: int) -> None:
        """A text of ``size`` characters may be made."""
        if size > self._cap:
            raise BudgetError(self._too_long())

    def _too_long(self) -> str:
        return f"the template makes more than {self._cap} bytes of text"

    def checked(self, value: Any) -> Any:
        """``value``, not larger than the cap; an iterator comes back as a list."""
        if isinstance(value, str):
            self.check_size(len(value))
        elif isinstance(value, int):
            if value.bit_length() > _MAX_INT_BITS:
                raise BudgetError("the template makes a number that is too large")
        elif isinstance(value, list | tuple | dict):
            self._measure([value], 0)
        elif isinstance(value, Iterator):
            return self._take(value)
        return value

    def _take(self, values: Iterator[Any]) -> list[Any]:
        taken: list[Any] = []
        size = 0
        for value in values:
            taken.append(value)
            size = self._measure([value], size)
        return taken

    def _measure(self, stack: list[Any], size: int) -> int:
        """``size`` plus the characters of the values on the stack when written out, roughly."""
        seen = 0
        while stack:
            item = stack.pop()
            seen += 1
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict):
                stack.extend(item)
                stack.extend(item.values())
            elif isinstance(item, list | tuple):
                stack.extend(item)
            size += _NODE_SIZE
            self.check_size(size)
            if seen == _NODES_PER_LOOK:
                self.spend(seen // _NODES_PER_OPERATION)
                seen = 0
        self.spend(seen // _NODES_PER_OPERATION)
        return size

    def check_binop(self, operator: str, left: Any, right: Any) -> None:
        """Arithmetic that can make much of little."""
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
                    self.check_size(len(sequence) * max(times, 0))
        elif operator == "**":
            if abs(left) > 2**64 or abs(right) > 64:
                raise BudgetError("the template raises to a power that is too large")
        elif operator == "%" and isinstance(left, str | bytes):
            raise BudgetError("the template uses % formatting, which is not allowed")

    def check_method(
        self, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """A method of str that can make a long text of a short one; the arguments to call with."""
        if name in _REFUSED_METHODS:
            raise BudgetError(f"the template calls str.{name}, which is not allowed")
        if name in _PADDING_METHODS:
            self._check_numbers((*args, *kwargs.values()))
            self.check_size(len(text) + text.count("\t") * _MAX_WIDTH)
        elif name == "replace":
            self._check_replace(text, (*args, *kwargs.values()))
        elif name == "join" and args:
            values = self.checked(args[0])
            self._check_join(text, values)
            return (values, *args[1:])
        return args

    def check_filter(
        self, name: str, value: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """A filter about to run; the value to run it on."""
        if name in TEXT_FILTERS or isinstance(value, Iterator):
            value = self.checked(value)
        options = (*rest, *kwargs.values())
        if name in _NUMBER_FILTERS:
            self._check_numbers(options)
        if name == "indent":
            widest = max([_MAX_WIDTH, *[len(text) for text in options if isinstance(text, str)]])
            self.check_size((str(value).count("\n") + 1) * (widest + 1))
        elif name == "replace":
            self._check_replace(str(value), options)
        elif name == "join" and options:
            self._check_join(str(options[0]), value)
        elif name == "sum" and not all(isinstance(item, int | float) for item in value):
            raise BudgetError("the template sums what are not numbers")
        return value

    def _check_numbers(self, options: Sequence[Any]) -> None:
        for number in options:
            if isinstance(number, int) and number > _MAX_WIDTH:
                raise BudgetError(
                    f"the template pads to {number} characters, more than {_MAX_WIDTH}"
                )

    def _check_replace(self, text: str, options: Sequence[Any]) -> None:
        if len(options) >= 2 and isinstance(options[0], str) and isinstance(options[1], str):
            self.check_size(len(text) + text.count(options[0]) * len(options[1]))

    def _check_join(self, separator: str, values: Any) -> None:
        if hasattr(values, "__len__"):
            self.check_size(len(values) * len(separator))
