"""What the client scripts share. They run in environments that have a client and nothing of ours.

    python openai_checks.py URL KEY EMBED_URL

runs every ``check_*`` function of the script and prints one JSON document: the trace of what went
wrong in each, null for what went right.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)

MODEL = "tiny"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOO_LONG: list[Any] = [{"role": "user", "content": "word " * 3000}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def is_weather(arguments: str | Mapping[str, Any]) -> bool:
    """Whether the arguments of a call are what the schema of ``WEATHER`` asks for."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    return (
        set(found) == {"city", "days"}
        and found["city"] in ("Paris", "Rome")
        and isinstance(found["days"], int)
        and 1 <= found["days"] <= 9
    )


def url() -> str:
    return sys.argv[1]


def key() -> str:
    return sys.argv[2]


def embed_url() -> str:
    return sys.argv[3]


def raised(kind: type[E], function: Callable[[], object]) -> E:
    """The error of this kind that a call ends with."""
    try:
        function()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def running() -> int:
    """Requests that the server says it works on."""
    request = urllib.request.Request(
        url().removesuffix("/v1") + "/load", headers={"Authorization": f"Bearer {key()}"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return int(json.load(response)["server_load"])


def wait_until_idle() -> None:
    """A request that was given up ends within a step; a busy machine gets a minute."""
    deadline = time.monotonic() + 60
    while running():
        assert time.monotonic() < deadline, "the request goes on without its client"
        time.sleep(0.02)


def run_checks(names: Mapping[str, Any]) -> None:
    """Run a script's checks and print what became of them."""
    checks: dict[str, Callable[[], None]] = {
        name.removeprefix("check_"): value
        for name, value in names.items()
        if name.startswith("check_")
    }
    found: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
    print(json.dumps(found))
