"""The environment variables that twostep reads, each in one place and typed."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES: tuple[tuple[str, str], ...] = (
    ("TWOSTEP_HOME", "where models fetched by name lie (default ~/.cache/twostep)"),
    ("TWOSTEP_OFFLINE", "1: never open the network"),
    ("TWOSTEP_API_KEY", "key that requests to `twostep serve` need"),
    ("TWOSTEP_DEBUG", "1: show Python tracebacks on errors"),
    ("TWOSTEP_CPU_ISA", "force kernels: scalar, avx2, avx512, amx, neon"),
    ("HF_HOME, HF_HUB_CACHE", "where Hub repositories are cached (huggingface_hub's own)"),
    ("HF_HUB_OFFLINE", "1: use Hub repositories from the cache only"),
    ("HF_ENDPOINT", "another Hub server"),
    ("HF_TOKEN", "access token for gated or private Hub repositories"),
    ("NO_COLOR", "any value: no colours"),
)
"""(name, meaning), for ``--help`` and the docs."""


def is_on(name: str) -> bool:
    """Whether a variable says yes; unset, empty, 0, false, no and off say no."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def home() -> Path:
    """twostep's own folder, which may not exist yet."""
    chosen = os.environ.get("TWOSTEP_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "twostep"


def is_offline() -> bool:
    """Whether the network must stay closed."""
    return is_on("TWOSTEP_OFFLINE") or is_on("HF_HUB_OFFLINE")


def hub_endpoint() -> str:
    """Address of the Hub, without a slash at the end."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
