"""Structs of ``/v1/embeddings``."""

from __future__ import annotations

import msgspec


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Texts, or token ids, whose vectors are wanted."""

    input: str | list[str | int | list[int]] | None = None
    model: str | None = None
    encoding_format: str | None = None
    """``float``, or ``base64``: the bytes of float32 numbers."""
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    """Of base64: ``little`` (also ``native``), or ``big``."""
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class EmbeddingData(msgspec.Struct, kw_only=True):
    """One vector."""

    index: int
    """Of its text in ``input``."""
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Token counts of all texts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """All vectors, in the order of ``input``."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage
