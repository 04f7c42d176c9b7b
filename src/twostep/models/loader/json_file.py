"""JSON objects out of files that may be broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostep.contracts.errors import ModelFileError
from twostep.models.loader.errors import corrupt, missing

Hook = Callable[[list[tuple[str, Any]]], dict[str, Any]]

MAX_JSON_BYTES = 200_000_000


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file ``path``.

    Raises:
        ModelFileError: The file is missing, unreadable, or holds no JSON object.
    """
    return parse_json(_read(path), path, "JSON")


def read_json_list(path: Path) -> list[Any]:
    """The list in the file ``path``; errors as ``read_json``'s."""
    value = _parse(_read(path), path, "JSON", None)
    if not isinstance(value, list):
        raise corrupt(path, "JSON", "not a JSON list")
    return value


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise corrupt(path, "size", f"more than {MAX_JSON_BYTES} bytes of JSON")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise missing(path.parent, path.name) from error
    except OSError as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error.strerror or error}); check the path and its rights"
        ) from error


def parse_json(data: bytes, path: Path, field: str, *, unique: bool = False) -> dict[str, Any]:
    """The object in ``data``; ``path`` and ``field`` are for the error.

    With ``unique``, two entries of one name are an error instead of the last one's win.
    """
    value = _parse(data, path, field, _unique if unique else None)
    if not isinstance(value, dict):
        raise corrupt(path, field, "not a JSON object")
    return value


def _parse(data: bytes, path: Path, field: str, hook: Hook | None) -> Any:
    try:
        return json.loads(data, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise corrupt(path, field, f"not JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result
