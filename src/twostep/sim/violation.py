"""What the simulator raises when something is wrong, and the names of its checks."""

from __future__ import annotations

CHECKS = {
    "I1": "references of a block = its holders (requests and fences)",
    "I2": "unreferenced blocks are in the free list, exactly once",
    "I3": "after a drain nothing is left, anywhere",
    "I4": "no slot is written by two requests, no shared block is written",
    "I5": "a read of position p gives position p of the own tokens, with the own salt",
    "I6": "a freed block is not handed out before its last step was processed",
    "I7": "a findable block is full, and its content hashes to its hash; both directions agree",
    "I8": "token budget, running requests and per-request caps are kept",
    "I9": "counters agree with the device, and grow except at a preemption",
    "I10": "each request ends exactly once, and nothing comes after the end",
    "I11": "streams equal the request alone; counts equal what was sent",
    "I13": "structured output: sampled tokens are those that the grammar allows",
    "I14": "first come, first served (or by priority): nobody starts before his turn",
    "I15": "a step is not empty while something could run",
    "I16": "every request makes progress after the faults stop",
    "I17": "the system drains after the faults stop, and takes a new request",
    "I20": "the same seed gives the same events",
    "isolation": "an error ends the request that caused it, and no other",
    "contract": "messages are those that the contracts describe",
    "crash": "the engine raised an error of its own",
}
"""Numbers are those of the invariants in docs/simulator.md."""


class Violation(BaseException):
    """A broken invariant.

    Not an ``Exception``: the engine core must not take it for a step that failed, and go on.
    """

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check
        self.message = message
