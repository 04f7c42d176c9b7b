"""How an engine pauses."""

from __future__ import annotations

from typing import Literal

PauseMode = Literal["abort", "wait", "keep"]
"""End every request; let those go on that were started; leave everybody where they are."""
