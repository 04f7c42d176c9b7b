"""A constraint as users write it, to a grammar as llguidance reads it, within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.sampling import StructuredOutputsParams

PARAM = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object")

WHITESPACE = r"[ ]?|\r?\n[ \t]{0,32}"
"""Between the parts of JSON: what people and ``json.dumps(indent=)`` write, and no more, so that
no model can fill its answer with it."""

_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""The mask is all tokens after which the text can still be completed, not one spelling of it."""
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:", re.M)
_NAME = re.compile(r"\b[A-Z_][A-Z0-9_]*\b")
_DIRECTIVE = re.compile(r"\s*%llguidance[ \t]*(\{[^\n]*\})[ \t]*(?:\n|$)")


class GrammarSource(msgspec.Struct, frozen=True):
    """What is compiled; equal sources give equal grammars."""

    kind: str
    text: str
    """Lark, as llguidance reads it."""


def invalid(message: str) -> InvalidRequestError:
    """The error of a constraint that cannot be kept."""
    return InvalidRequestError(message, PARAM, "invalid_schema")


def is_constrained(params: StructuredOutputsParams) -> bool:
    """Whether there is a text to compile; else there is only a bound on reasoning."""
    return any(getattr(params, name) not in (None, False) for name in KINDS)


def kind_of(params: StructuredOutputsParams) -> str:
    """The one kind that is set. Raises InvalidRequestError if it is not exactly one."""
    kinds = [name for name in KINDS if getattr(params, name) not in (None, False)]
    if len(kinds) != 1:
        raise invalid(f"{PARAM} must set exactly one of {', '.join(KINDS)}")
    return kinds[0]


def grammar_source(params: StructuredOutputsParams, limits: Limits) -> GrammarSource:
    """The grammar of a constraint.

    Raises:
        InvalidRequestError: Not exactly one kind, malformed, or beyond a limit, which is named.
    """
    kind = kind_of(params)
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else _read_schema(params.json, limits)
        return GrammarSource(kind, f"{_NO_FORCING}start: %json {_dump(schema, params, limits)}\n")
    if kind == "regex":
        pattern = _text(params.regex, "regex")
        _check_size("the regex", pattern, limits.max_regex_bytes, "max_regex_bytes")
        return GrammarSource(kind, f"{_NO_FORCING}start: {_lark_regex(pattern)}\n")
    if kind == "choice":
        return GrammarSource(kind, f"{_NO_FORCING}start: {_choice(params.choice, limits)}\n")
    text = _text(params.grammar, "grammar")
    _check_size("the grammar", text, limits.max_grammar_bytes, "max_grammar_bytes")
    text = _unforced(text)
    check_terminals(text, limits)
    return GrammarSource(kind, text)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise invalid(f"{PARAM}.{name} must be a text that is not blank")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise invalid(f"{PARAM}.{name} has a lone surrogate; remove it") from None
    if "\0" in value:
        raise invalid(f"{PARAM}.{name} has a character U+0000; remove it")
    return value


def _check_size(what: str, text: str, most: int, limit: str) -> None:
    size = len(text.encode("utf-8"))
    if size > most:
        raise invalid(f"{what} has {size} bytes; at most {most} ({limit}) are allowed")


# -- JSON schemas ----------------------------------------------------------------------------------


def _read_schema(schema: Any, limits: Limits) -> dict[str, Any]:
    if isinstance(schema, str):
        _check_size("the schema", schema, limits.max_schema_bytes, "max_schema_bytes")
        try:
            schema = json.loads(schema, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            detail = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
            raise invalid(f"the schema is not JSON: {detail}") from None
    if schema is True:
        return {}
    if schema is False:
        raise invalid("the schema is false, which allows no value")
    if not isinstance(schema, dict):
        raise invalid(f"the schema is a {type(schema).__name__}; it must be a JSON object")
    _check_shape(schema, limits)
    return schema


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _check_shape(schema: dict[str, Any], limits: Limits) -> None:
    """Depth of the document and properties of each object, without recursion."""
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > limits.max_schema_depth:
            raise invalid(
                f"the schema nests more than {limits.max_schema_depth} levels deep "
                "(max_schema_depth); flatten it or use $ref"
            )
        if isinstance(node, dict):
            properties = node.get("properties")
            count = len(properties) if isinstance(properties, dict) else 0
            if count > limits.max_schema_properties:
                raise invalid(
                    f"an object of the schema has {count} properties; at most "
                    f"{limits.max_schema_properties} (max_schema_properties) are allowed"
                )
            stack += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            stack += [(value, depth + 1) for value in node]


def _dump(schema: dict[str, Any], params: StructuredOutputsParams, limits: Limits) -> str:
    """The document with our options, which replace those it may bring."""
    options: dict[str, Any] = {"lenient": not params.strict}
    if params.disable_any_whitespace:
        options |= {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    else:
        options["whitespace_pattern"] = _whitespace(params.whitespace_pattern, limits)
    try:
        text = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise invalid(f"the schema is not JSON: {error}") from None
    _check_size("the schema", text, limits.max_schema_bytes, "max_schema_bytes")
    return text


def _whitespace(pattern: str | None, limits: Limits) -> str:
    if pattern is None:
        return WHITESPACE
    pattern = _text(pattern, "whitespace_pattern")
    _check_size("whitespace_pattern", pattern, limits.max_regex_bytes, "max_regex_bytes")
    return pattern


# -- the other kinds -------------------------------------------------------------------------------


def _lark_regex(pattern: str) -> str:
    from llguidance import LLMatcher

    document = json.loads(LLMatcher.grammar_from_regex(pattern))
    lark: str = document["grammars"][0]["lark_grammar"]
    return lark.removeprefix("start: ")


def _choice(choice: Any, limits: Limits) -> str:
    if not isinstance(choice, list | tuple) or not choice:
        raise invalid(f"{PARAM}.choice must be a list of texts, at least one")
    if len(choice) > limits.max_choices:
        raise invalid(
            f"{PARAM}.choice has {len(choice)} entries; at most {limits.max_choices} "
            "(max_choices) are allowed"
        )
    for text in choice:
        if not isinstance(text, str) or not text:
            raise invalid(f"{PARAM}.choice must hold texts that are not empty")
        _text(text + "x", "choice")
    # A regex, because Lark's strings know fewer escapes than JSON's.
    pattern = "|".join(map(_escape, choice))
    _check_size("the choice", pattern, limits.max_schema_bytes, "max_schema_bytes")
    return _lark_regex(pattern)


def _escape(text: str) -> str:
    """A regex of exactly this text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _unforced(text: str) -> str:
    """The user's Lark with our option; a directive of its own at the head keeps its others."""
    if re.search(r"^\s*root\s*::=", text, re.MULTILINE):
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:
            raise invalid(f"the grammar cannot be read as GBNF: {_first_line(error)}") from None
    options: dict[str, Any] = {}
    if found := _DIRECTIVE.match(text):
        try:
            options = json.loads(found[1])
        except (ValueError, RecursionError):
            raise invalid("the grammar's %llguidance directive is not a JSON object") from None
        text = text[found.end() :]
    return f"%llguidance {json.dumps({**options, 'no_forcing': True})}\n{text}"


def check_terminals(lark: str, limits: Limits) -> None:
    """Refuse terminals that grow beyond all bounds when each is put in the place of its name.

    llguidance does that before it counts anything: T0: T1 T1, T1: T2 T2, ... would never end.
    """
    rules = list(_RULE.finditer(lark))
    ends = [*(rule.start() for rule in rules), len(lark)][1:]
    bodies = {
        rule[1]: _NAME.findall(lark[rule.end() : end])
        for rule, end in zip(rules, ends, strict=True)
        if rule[1].isupper()
    }
    sizes: dict[str, int] = {}
    for name in bodies:
        if _expanded(name, bodies, sizes) > limits.max_terminal_names:
            raise invalid(
                f"the terminal {name[:40]} stands for more than {limits.max_terminal_names} names "
                "(max_terminal_names); make it a rule, in lower case, or simpler"
            )


def _expanded(name: str, bodies: Mapping[str, list[str]], sizes: dict[str, int]) -> int:
    """Names in a terminal when all are put in place; without recursion. Cycles count as one."""
    stack = [name]
    while stack:
        top = stack[-1]
        if top in sizes and sizes[top]:
            stack.pop()
            continue
        sizes.setdefault(top, 0)
        missing = [ref for ref in bodies[top] if ref in bodies and ref not in sizes]
        if missing:
            stack.extend(missing)
            continue
        sizes[top] = 1 + sum(sizes.get(ref, 0) or 1 for ref in bodies[top])
        stack.pop()
    return sizes[name]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
