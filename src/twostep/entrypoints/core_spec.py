"""What the engine core's process is told on its command line."""

from __future__ import annotations

import sys

import msgspec

from twostep.entrypoints.engine_options import EngineOptions


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON argument."""

    wire: int
    """File descriptor of the socket to the parent, whose end of file ends the core."""
    heartbeat: int
    """File descriptor of the shared memory for signs of life."""
    parent_pid: int
    model: str
    """As the user called it."""
    path: str
    """A ``.gguf`` file, or a directory in Hugging Face layout."""
    options: EngineOptions

    def command(self) -> list[str]:
        """To be executed. The current folder stays off the module path (-P)."""
        spec = msgspec.json.encode(self).decode()
        return [sys.executable, "-P", "-m", "twostep.entrypoints.core_main", spec]
