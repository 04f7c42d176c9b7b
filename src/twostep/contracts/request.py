"""What the front end sends to the engine core."""

from __future__ import annotations

import enum

import msgspec

from twostep.contracts.sampling import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a request ended. Every request ends exactly once, with one of these."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        """The word that users see."""
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate (``n > 1`` arrives as n of these). Already validated."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    """With ``seed`` and ``max_tokens`` filled in, never None."""
    eos_token_id: int | None
    """None when ``ignore_eos``. Further end ids are in ``sampling_params.stop_token_ids``."""
    arrival_time: float
    """Seconds, front end's wall clock."""
    client_index: int = 0
    priority: int = 0
    """Smaller runs first under the priority policy."""
    cache_salt: str | None = None
    """Isolates the prefix cache between tenants."""
