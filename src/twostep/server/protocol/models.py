"""Structs of ``/v1/models``."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelMeta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Facts that pages show."""

    n_params: int | None = None
    size_bytes: int | None = None
    quantization: str | None = None
    n_ctx_train: int | None = None
    vocab_size: int | None = None


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that can be asked."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "twostep"
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[dict[str, Any]] = msgspec.field(default_factory=list)
    meta: ModelMeta | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """All of them."""

    object: str = "list"
    data: list[ModelCard]
