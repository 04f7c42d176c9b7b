"""An engine in a process of its own: ``PYTHON -m benchmarks.worker MODULE``, JSON lines in and out.

Runs under the peer's interpreter, so this file and what it imports need only the standard library.
Messages: ``load`` (model, limits), ``run`` (requests, cached, greedy), ``likeliest`` (prompts,
count). Each is answered by one line, ``{"error": …}`` if it failed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from benchmarks.cells import Request


def main(module: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print; only answers may go out
    session = importlib.import_module(f"benchmarks.peers.{module}").Session()
    for line in sys.stdin:
        try:
            reply = answer(session, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        answers.write(json.dumps(reply) + "\n")


def answer(session: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Do what a message asks."""
    what = message.pop("op")
    if what == "load":
        session.load(message["model"], message["limits"])
        return {}
    if what == "run":
        requests = [Request(**request) for request in message["requests"]]
        found = session.run(requests, cached=message["cached"], greedy=message["greedy"])
        return {"answers": found}
    if what == "likeliest":
        return {"token_ids": session.likeliest(message["prompts"], message["count"])}
    raise ValueError(f"unknown op {what}")


if __name__ == "__main__":
    main(sys.argv[1])
