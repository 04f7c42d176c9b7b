"""Structs of the small endpoints."""

from __future__ import annotations

import msgspec


class HealthResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why a server is not healthy or not ready."""

    status: str
    """``loading``, ``ready``, ``restarting``, ``draining``, ``dead`` or ``stalled``."""
    phase: str | None = None
    percent: int | None = None
    error: str | None = None
    """Why the engine is not well."""


class VersionResponse(msgspec.Struct, kw_only=True):
    """The version of twostep."""

    version: str


class LoadResponse(msgspec.Struct, kw_only=True):
    """Generation requests that have not ended."""

    server_load: int
