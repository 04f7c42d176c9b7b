"""Request bodies to structs, and what msgspec finds wrong with them to errors that name a field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from twostep.server.errors import ApiError

T = TypeVar("T")

_AT = re.compile(r" - at `(?:key in )?`?\$(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")
_EXPECTED = re.compile(r"Expected `(?P<wanted>.+)`, got `(?P<got>[^`]+)`")

_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


def decode_body(body: bytes, kind: type[T]) -> T:
    """A JSON body as ``kind``.

    Numbers like ``5.0`` are integers, null is the same as an absent field, unknown fields are
    ignored. Raises ApiError: invalid_json, missing_required_parameter, invalid_type,
    invalid_value.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = error
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _invalid_json(error) from None
    if "got `float`" in str(found):
        try:
            return msgspec.convert(_with_integers(msgspec.json.decode(body)), kind)
        except msgspec.ValidationError as error:
            found = error
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise _invalid_json(error) from None
    raise explain(found) from None


def _invalid_json(error: Exception) -> ApiError:
    why = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
    return ApiError("invalid_json", f"the request body is not valid JSON: {why}")


def _with_integers(value: Any) -> Any:
    """The same document with every float of an integer's value as an integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    return value


def explain(error: msgspec.ValidationError) -> ApiError:
    """What msgspec says, as an error with the path of the field."""
    text = str(error)
    at = _AT.search(text)
    path = at["path"].lstrip(".") if at else ""
    what = text[: at.start()] if at else text
    if missing := _MISSING.fullmatch(what):
        return _missing(f"{path}.{missing['field']}" if path else missing["field"])
    if expected := _EXPECTED.fullmatch(what):
        wanted, got = expected["wanted"], expected["got"]
        if got == "null" and path:
            return _missing(path)
        where = path or "the request body"
        return ApiError(
            "invalid_type",
            f"{where} is {_name(got)}; it must be {_alternatives(wanted)}",
            path or None,
        )
    return ApiError("invalid_value", f"{path or 'the request body'}: {what}", path or None)


def _missing(path: str) -> ApiError:
    return ApiError("missing_required_parameter", f"{path} is required and was not given", path)


def _alternatives(wanted: str) -> str:
    names = [_name(part) for part in wanted.split(" | ") if part != "null"]
    return " or ".join(names) or "null"


def _name(kind: str) -> str:
    return _NAMES.get(kind, kind)
