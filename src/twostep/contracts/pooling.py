"""Embeddings: what a request may ask for, and how a model makes one vector of a text."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingType = Literal["last", "mean", "cls"]
"""The last token's hidden state, the mean of all, or the first token's."""


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a request wants its vector. ``frontend`` validates it."""

    dimensions: int | None = None
    """Numbers of the vector; only models trained for it (matryoshka) can be asked for fewer."""
    normalize: bool | None = None
    """Scale the vector to length 1; None is what the model says."""
    priority: int = 0


class Pooler(msgspec.Struct, frozen=True, kw_only=True):
    """How the vectors of an engine are made; such an engine generates no text."""

    kind: PoolingType
    normalize: bool
    """Whether vectors have length 1 unless a request says otherwise."""
    size: int
    """Numbers of a whole vector."""
    is_matryoshka: bool = False
    """Whether the first numbers of a vector are a vector of their own."""
    dimensions: tuple[int, ...] = ()
    """How many of them; empty: any number, if ``is_matryoshka``."""
