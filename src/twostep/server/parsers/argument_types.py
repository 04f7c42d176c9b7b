"""Arguments written as plain text, to JSON by the types of a function's parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

STRING_ONLY = frozenset({"string"})

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_MAX_REFS = 16


class ParameterTypes:
    """The JSON types that each parameter of a function may have."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        """``schema``: the function's ``parameters``. What it does not tell is a string."""
        self._root = schema or {}
        properties = self._root.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    def of(self, parameter: str) -> frozenset[str]:
        """Names of JSON Schema types."""
        return frozenset(self._types(self._properties.get(parameter), _MAX_REFS)) or STRING_ONLY

    def _types(self, schema: Any, refs_left: int) -> Iterator[str]:
        if not isinstance(schema, Mapping) or refs_left == 0:
            return
        declared = schema.get("type")
        if isinstance(declared, str):
            yield declared
        elif isinstance(declared, list):
            yield from (name for name in declared if isinstance(name, str))
        if isinstance(schema.get("enum"), list):
            yield from map(_type_of, schema["enum"])
        if "const" in schema:
            yield _type_of(schema["const"])
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            for branch in branches if isinstance(branches, list) else ():
                yield from self._types(branch, refs_left - 1)
        if isinstance(schema.get("$ref"), str):
            yield from self._types(self._resolve(schema["$ref"]), refs_left - 1)

    def _resolve(self, reference: str) -> Any:
        """What a reference into the same schema (``#/$defs/Name``) points to, None if nothing."""
        if not reference.startswith("#"):
            return None
        target: Any = self._root
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or part not in target:
                return None
            target = target[part]
        return target


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def json_value(text: str, types: frozenset[str]) -> str:
    """``text`` as JSON of one of the types; as a string if it is none of the others."""
    bare = text.strip()
    lower = bare.lower()
    if "null" in types and lower in ("null", "none"):
        return "null"
    if "boolean" in types and lower in ("true", "false"):
        return lower
    if types & {"integer", "number"} and _INTEGER.fullmatch(bare):
        return bare
    wanted: tuple[type, ...] = ()
    if "number" in types:
        wanted += (float,)
    if "object" in types:
        wanted += (dict,)
    if "array" in types:
        wanted += (list,)
    if wanted and isinstance(_parsed(bare), wanted):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
