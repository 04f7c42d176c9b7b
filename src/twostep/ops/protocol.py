"""The ops a model is made of. Backends implement :class:`Ops` on handles of their own.

Legend: T tokens of the flat batch, H hidden size, D head dimension, V vocabulary,
S rows that are sampled (``batch.logits_indices``).

A model's two halves, ``forward`` and ``compute_logits``, run once on a recording backend (``cpu``),
or every step on an eager one (``reference``). It may not look inside a handle.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from twostep.config.model import Activation, RopeConfig

Tensor: TypeAlias = Any
"""Handle of an activation, [T, width] or [S, width]."""
Queries: TypeAlias = Any
"""Handle of the queries of one attention layer, made by ``rope_cache``."""
Weight: TypeAlias = Any
"""Handle of a weight, made by the backend's loader hooks."""
Carried: TypeAlias = tuple[Any, ...]
"""Handles that a model's ``forward`` leaves for its ``final_states``."""
FlatBatch: TypeAlias = Any
"""The backend's description of this step: token ids, positions, block tables."""

LinearPrecision = Literal["int8", "bf16"]


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One attention layer."""

    layer: int
    """Index into the KV cache."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    """None: q and k are not rotated."""
    sliding_window: int | None = None
    softcap: float = 0.0
    qk_norm_eps: float = 0.0
    """Used when ``q_norm`` and ``k_norm`` are given."""
    causal: bool = True
    """False: every token sees the whole text, which must be in one step."""


class Ops(Protocol):
    """Some dozen ops; every backend has these, with the same meaning.

    Determinism: each output element is computed in an order that depends only on its own row.
    """

    def embed(self, table: Weight, batch: FlatBatch, *, scale: float = 1.0) -> Tensor:
        """Rows of ``table`` [V, H] for the batch's token ids, times ``scale`` → [T, H]."""
        ...

    def add_positions(self, x: Tensor, table: Weight, batch: FlatBatch) -> Tensor:
        """``x`` plus the row of ``table`` [P, H] of each token's position; ``x`` is dead then."""
        ...

    def layer_norm(self, x: Tensor, weight: Weight, bias: Weight, *, eps: float) -> Tensor:
        """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` (Ba et al. 2016)."""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """``x * Phi(x)``, the exact GELU (Hendrycks & Gimpel 2016)."""
        ...

    def rms_norm(self, x: Tensor, weight: Weight, *, eps: float) -> Tensor:
        """``x / sqrt(mean(x²) + eps) * weight`` over the last axis (Zhang & Sennrich 2019)."""
        ...

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + x``; the backend may write into ``residual``, which is dead afterwards."""
        ...

    def linear(self, x: Tensor, weight: Weight, *, bias: Weight | None = None) -> Tensor:
        """``x @ weight.T + bias``. ``weight`` [N, K] may be several stacked row-wise."""
        ...

    def gated_linear(
        self, x: Tensor, gate: Weight, up: Weight, *, activation: Activation
    ) -> Tensor:
        """``act(x @ gate.T) * (x @ up.T)`` → [T, N]."""
        ...

    def rope_cache(
        self,
        qkv: Tensor,
        batch: FlatBatch,
        spec: AttentionSpec,
        *,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
        may_sample: bool = False,
    ) -> Queries:
        """Norm q and k per head (if given), rotate them, write k and v to the paged cache.

        ``qkv`` is [T, (num_heads + 2 * num_kv_heads) * D], in that order; it is dead afterwards.
        ``may_sample``: the attention that follows may be of the sampled rows only.
        """
        ...

    def attention(
        self, queries: Queries, batch: FlatBatch, spec: AttentionSpec, *, sampled: bool = False
    ) -> Tensor:
        """Attend over the paged cache → [T, num_heads * D], or [S, ...] of the sampled rows."""
        ...

    def moe(
        self,
        x: Tensor,
        router: Weight,
        gate: list[Weight],
        up: list[Weight],
        down: list[Weight],
        *,
        top_k: int,
        norm_topk_prob: bool,
        activation: Activation,
    ) -> Tensor:
        """Softmax over experts, the best ``top_k`` (ties: lower id), summed in expert order."""
        ...

    def gather_rows(self, x: Tensor, batch: FlatBatch) -> Tensor:
        """Rows ``batch.logits_indices`` of ``x`` → [S, H]."""
        ...

    def logits(self, x: Tensor, weight: Weight, *, softcap: float = 0.0) -> Tensor:
        """``x @ weight.T`` → [S, V] float32, then ``softcap * tanh(y / softcap)`` if set."""
        ...


class WeightFactory(Protocol):
    """How a loader hands weights to a backend. ``data`` may be a read-only memory map."""

    def is_finite(self, tensor: RawTensor) -> bool:
        """Whether no weight of the tensor is NaN or infinite."""
        ...

    def linear(self, parts: list[RawTensor], *, precision: LinearPrecision) -> Weight:
        """Parts stacked row-wise ([N_i, K] each, formats may differ), packed for ``linear``."""
        ...

    def gated(
        self, gate: RawTensor, up: RawTensor, *, precision: LinearPrecision
    ) -> tuple[Weight, Weight]:
        """The pair for ``gated_linear``."""
        ...

    def embedding(self, table: RawTensor, *, tied: bool, precision: LinearPrecision) -> Weight:
        """The table [V, H] for ``embed``; if ``tied``, the same handle also serves ``logits``."""
        ...

    def vector(self, tensor: RawTensor) -> Weight:
        """A norm weight or bias, kept in float32."""
        ...


class RawTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor as its file holds it."""

    name: str
    format: str
    """F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"""
    shape: tuple[int, ...]
    """Outermost first: [N, K] for a matrix."""
    data: Any
    """numpy uint8, C-contiguous, exactly the bytes of the tensor in its format."""
