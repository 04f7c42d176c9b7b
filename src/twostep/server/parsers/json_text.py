"""JSON that arrives in pieces and need not be valid: strings decoded, values delimited."""

from __future__ import annotations

import re
import string

_PLAIN = re.compile(r'[^"\\]+')
_PLAIN_SINGLE = re.compile(r"[^'\\]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_STRUCTURE = re.compile(r'[^"{}\[\]<]+')


class StringDecoder:
    """The content of one string, from behind its opening quote."""

    def __init__(self, quote: str = '"') -> None:
        self.closed = False
        self._quote = quote
        self._plain = _PLAIN if quote == '"' else _PLAIN_SINGLE
        self._escape: str | None = None
        """What came of an escape, without its backslash; None outside of one."""
        self._high = ""
        """A high surrogate that waits for its low one."""

    def decode(self, text: str, position: int) -> tuple[str, int]:
        """(content that is certain now, position behind what was read)."""
        out: list[str] = []
        while position < len(text) and not self.closed:
            if self._escape is not None:
                position += self._take_escape(text[position], out)
                continue
            match = self._plain.match(text, position)
            if match:
                self._flush_high(out)
                out.append(match.group())
                position = match.end()
            elif text[position] == "\\":
                self._escape = ""
                position += 1
            else:
                self._flush_high(out)
                self.closed = True
                position += 1
        return "".join(out), position

    def _take_escape(self, char: str, out: list[str]) -> int:
        """Read ``char`` as a part of the escape: 1, or 0 if it is none."""
        assert self._escape is not None
        if not self._escape and char != "u":
            self._escape = None
            self._flush_high(out)
            out.append(_ESCAPES.get(char, char))
            return 1
        if self._escape and char not in string.hexdigits:
            self._flush_high(out)
            out.append("\\" + self._escape)
            self._escape = None
            return 0
        self._escape += char
        if len(self._escape) == 5:
            unit, self._escape = chr(int(self._escape[1:], 16)), None
            self._take_unit(unit, out)
        return 1

    def _take_unit(self, unit: str, out: list[str]) -> None:
        """One UTF-16 unit; a lone surrogate becomes U+FFFD."""
        if self._high and "\udc00" <= unit <= "\udfff":
            pair, self._high = self._high + unit, ""
            out.append(pair.encode("utf-16", "surrogatepass").decode("utf-16"))
            return
        self._flush_high(out)
        if "\ud800" <= unit <= "\udbff":
            self._high = unit
        else:
            out.append("\ufffd" if "\udc00" <= unit <= "\udfff" else unit)

    def _flush_high(self, out: list[str]) -> None:
        if self._high:
            out.append("\ufffd")
            self._high = ""


class ValueSpan:
    """Where an object or array ends, from its opening bracket on.

    Brackets are counted whatever their kind, outside of strings. Between two calls of ``take`` the
    position must not move.
    """

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._in_string

    def take(self, text: str, position: int) -> int:
        """Read on; stops behind the closing bracket, and in front of a "<" or "[" outside of
        strings, where a marker may stand: the caller skips it with ``take_char`` if none does."""
        while position < len(text) and not self.closed:
            if self._in_string:
                position = self._take_string(text, position)
                continue
            match = _STRUCTURE.match(text, position)
            if match:
                position = match.end()
            elif text[position] in "<[":
                return position
            else:
                self.take_char(text[position])
                position += 1
        return position

    def take_char(self, char: str) -> None:
        """Read one character outside of strings."""
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.closed = self._depth <= 0

    def _take_string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        match = _PLAIN.match(text, position)
        if match:
            return match.end()
        if text[position] == "\\":
            self._escaped = True
        else:
            self._in_string = False
        return position + 1
