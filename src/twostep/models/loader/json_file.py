"""JSON objects out of files that may be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twostep.contracts.errors import ModelFileError
from twostep.models.loader.errors import corrupt, missing

MAX_JSON_BYTES = 200_000_000


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file ``path``.

    Raises:
        ModelFileError: The file is missing, unreadable, or holds no JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise corrupt(path, "size", f"more than {MAX_JSON_BYTES} bytes of JSON")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise missing(path.parent, path.name) from error
    except OSError as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error.strerror or error}); check the path and its rights"
        ) from error
    return parse_json(data, path, "JSON")


def parse_json(data: bytes, path: Path, field: str, *, unique: bool = False) -> dict[str, Any]:
    """The object in ``data``; ``path`` and ``field`` are for the error.

    With ``unique``, two entries of one name are an error instead of the last one's win.
    """
    try:
        value = json.loads(data, object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise corrupt(path, field, f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise corrupt(path, field, "not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result
