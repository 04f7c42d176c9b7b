"""Things that must happen now and then, or the simulator does not look where bugs are."""

from __future__ import annotations

SOMETIMES = (
    "preempted with shared blocks",
    "aborted with a step in flight",
    "evicted block asked for again",
    "hit on the last full block",
    "everything cached",
    "budget used up by a chunk",
    "no block is free",
    "preempted twice",
    "branch of n > 1 aborted",
    "grammar error",
    "step failed while blocks are fenced",
    "drain with waiting requests",
    "refused at admission",
    "same prompt, other salt",
    "draft refused",
    "block fell out of the window",
)
"""Names of the events that a long run must hit, each at least 100 times."""
