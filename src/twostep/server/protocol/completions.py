"""Structs of ``/v1/completions``."""

from __future__ import annotations

from typing import Any

import msgspec

from twostep.server.protocol.common import SamplingFields, Timings, Usage


class CompletionRequest(SamplingFields, kw_only=True):
    """Text, or token ids, to be continued."""

    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """All continuations."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: str | None = None
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
