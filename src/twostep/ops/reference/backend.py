"""The reference backend: ``Ops`` done eagerly on float32 arrays, over a real paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostep.config.model import Activation, RopeConfig
from twostep.ops.formats import FORMATS, dequantize, is_finite
from twostep.ops.protocol import AttentionSpec, LinearPrecision, RawTensor
from twostep.ops.reference.activation import gated, gelu
from twostep.ops.reference.attention import paged_attention, write_kv
from twostep.ops.reference.linear import ActivationMode, linear
from twostep.ops.reference.linear import softcap as cap_logits
from twostep.ops.reference.moe import route
from twostep.ops.reference.norm import layer_norm, rms_norm
from twostep.ops.reference.rope import apply_rope, rope_tables
from twostep.ops.reference.rounding import Float32Array, StorageDtype, round_bf16


class ReferenceWeight(msgspec.Struct, frozen=True):
    """A matrix [N, K] or vector [N] in float32, and how activations meet it."""

    values: Float32Array
    act: ActivationMode = "f32"


class ReferenceBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One step: the scheduled tokens of R requests, one after the other."""

    token_ids: NDArray[np.int64]
    """[T]"""
    positions: NDArray[np.int64]
    """[T]"""
    query_start_loc: NDArray[np.int64]
    """[R + 1]: request r owns rows query_start_loc[r] .. query_start_loc[r + 1] - 1."""
    block_tables: list[NDArray[np.int64]]
    """Block ids of each request, in order of position."""
    logits_indices: NDArray[np.int64]
    """[S]: the rows whose logits are wanted."""

    @classmethod
    def of(
        cls,
        chunks: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        *,
        logits: Literal["last", "all"] = "last",
    ) -> ReferenceBatch:
        """A batch out of (token ids, position of the first of them, block ids) of each request.

        Args:
            chunks: One entry for each request.
            logits: Of each request's last row, or of all rows.
        """
        lengths = [len(tokens) for tokens, _, _ in chunks]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        rows = starts[1:] - 1 if logits == "last" else np.arange(starts[-1])
        return cls(
            token_ids=np.concatenate([np.asarray(tokens, np.int64) for tokens, _, _ in chunks]),
            positions=np.concatenate(
                [np.arange(first, first + len(tokens)) for tokens, first, _ in chunks]
            ).astype(np.int64),
            query_start_loc=starts,
            block_tables=[np.asarray(blocks, np.int64) for _, _, blocks in chunks],
            logits_indices=rows.astype(np.int64),
        )


class ReferenceWeights:
    """Implements ``WeightFactory``: everything unpacked to float32.

    Args:
        exact: Compute in full precision, whatever the layer's precision. If false, do what the
            native kernels do: int8 layers quantise their activations in groups of 32, bf16 layers
            round activations and weights to bf16.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact

    def is_finite(self, tensor: RawTensor) -> bool:
        """See ``WeightFactory.is_finite``."""
        return is_finite(tensor)

    def linear(self, parts: list[RawTensor], *, precision: LinearPrecision) -> ReferenceWeight:
        """See ``WeightFactory.linear``."""
        values = np.concatenate([dequantize(part) for part in parts])
        if self.exact:
            return ReferenceWeight(values)
        if precision == "int8" and all(FORMATS[part.format].is_quantized for part in parts):
            return ReferenceWeight(values, "q8")
        return ReferenceWeight(round_bf16(values), "bf16")

    def gated(
        self, gate: RawTensor, up: RawTensor, *, precision: LinearPrecision
    ) -> tuple[ReferenceWeight, ReferenceWeight]:
        """See ``WeightFactory.gated``."""
        return self.linear([gate], precision=precision), self.linear([up], precision=precision)

    def embedding(
        self, table: RawTensor, *, tied: bool, precision: LinearPrecision
    ) -> ReferenceWeight:
        """See ``WeightFactory.embedding``."""
        return self.linear([table], precision=precision)

    def vector(self, tensor: RawTensor) -> ReferenceWeight:
        """See ``WeightFactory.vector``."""
        return ReferenceWeight(dequantize(tensor))


class ReferenceOps:
    """Implements ``Ops``: handles are float32 arrays, every call computes at once.

    The KV cache starts full of NaN, so that reading what was never written shows.

    Args:
        num_layers, num_kv_heads, head_dim: Shape of the cache, with
        num_blocks, block_size: [num_blocks, block_size, num_kv_heads, head_dim] per layer.
        kv_dtype: What keys and values are rounded to when stored.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int = 16,
        kv_dtype: StorageDtype = "fp32",
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.k_cache = np.full(shape, np.nan, dtype=np.float32)
        self.v_cache = np.full(shape, np.nan, dtype=np.float32)
        self.kv_dtype = kv_dtype
        self._tables: dict[RopeConfig, tuple[Float32Array, Float32Array]] = {}

    def embed(
        self, table: ReferenceWeight, batch: ReferenceBatch, *, scale: float = 1.0
    ) -> Float32Array:
        """See ``Ops.embed``."""
        return table.values[batch.token_ids] * np.float32(scale)

    def add_positions(
        self, x: Float32Array, table: ReferenceWeight, batch: ReferenceBatch
    ) -> Float32Array:
        """See ``Ops.add_positions``."""
        rows: Float32Array = table.values[batch.positions]
        return x + rows

    def layer_norm(
        self, x: Float32Array, weight: ReferenceWeight, bias: ReferenceWeight, *, eps: float
    ) -> Float32Array:
        """See ``Ops.layer_norm``."""
        return layer_norm(x, weight.values, bias.values, eps)

    def gelu(self, x: Float32Array) -> Float32Array:
        """See ``Ops.gelu``."""
        return gelu(x)

    def rms_norm(self, x: Float32Array, weight: ReferenceWeight, *, eps: float) -> Float32Array:
        """See ``Ops.rms_norm``."""
        return rms_norm(x, weight.values, eps)

    def add(self, residual: Float32Array, x: Float32Array) -> Float32Array:
        """See ``Ops.add``."""
        return residual + x

    def linear(
        self, x: Float32Array, weight: ReferenceWeight, *, bias: ReferenceWeight | None = None
    ) -> Float32Array:
        """See ``Ops.linear``."""
        return linear(x, weight.values, weight.act, None if bias is None else bias.values)

    def gated_linear(
        self,
        x: Float32Array,
        gate: ReferenceWeight,
        up: ReferenceWeight,
        *,
        activation: Activation,
    ) -> Float32Array:
        """See ``Ops.gated_linear``."""
        return gated(self.linear(x, gate), self.linear(x, up), activation)

    def rope_cache(
        self,
        qkv: Float32Array,
        batch: ReferenceBatch,
        spec: AttentionSpec,
        *,
        q_norm: ReferenceWeight | None = None,
        k_norm: ReferenceWeight | None = None,
        may_sample: bool = False,
    ) -> Float32Array:
        """See ``Ops.rope_cache``: rotated queries [T, num_heads, D]."""
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        rows = qkv.reshape(len(qkv), heads + 2 * kv_heads, spec.head_dim)
        q, k, v = np.split(rows, [heads, heads + kv_heads], axis=1)
        if q_norm is not None:
            q = rms_norm(q, q_norm.values, spec.qk_norm_eps)
        if k_norm is not None:
            k = rms_norm(k, k_norm.values, spec.qk_norm_eps)
        if spec.rope is not None:
            cos, sin = self._rope_rows(spec.rope, batch.positions)
            q = apply_rope(q, cos, sin, interleaved=spec.rope.interleaved)
            k = apply_rope(k, cos, sin, interleaved=spec.rope.interleaved)
        for request, block_table in enumerate(batch.block_tables):
            own = slice(*batch.query_start_loc[request : request + 2])
            positions = batch.positions[own]
            write_kv(self.k_cache[spec.layer], k[own], block_table, positions, self.kv_dtype)
            write_kv(self.v_cache[spec.layer], v[own], block_table, positions, self.kv_dtype)
        return q

    def attention(
        self,
        queries: Float32Array,
        batch: ReferenceBatch,
        spec: AttentionSpec,
        *,
        sampled: bool = False,
    ) -> Float32Array:
        """See ``Ops.attention``."""
        out = np.empty_like(queries)
        for request, block_table in enumerate(batch.block_tables):
            own = slice(*batch.query_start_loc[request : request + 2])
            out[own] = paged_attention(
                queries[own],
                self.k_cache[spec.layer],
                self.v_cache[spec.layer],
                block_table,
                batch.positions[own],
                scale=spec.scale,
                sliding_window=spec.sliding_window,
                softcap=spec.softcap,
                causal=spec.causal,
            )
        out = out.reshape(len(out), spec.num_heads * spec.head_dim)
        return out[batch.logits_indices] if sampled else out

    def moe(
        self,
        x: Float32Array,
        router: ReferenceWeight,
        gate: list[ReferenceWeight],
        up: list[ReferenceWeight],
        down: list[ReferenceWeight],
        *,
        top_k: int,
        norm_topk_prob: bool,
        activation: Activation,
    ) -> Float32Array:
        """See ``Ops.moe``."""
        experts, weights = route(self.linear(x, router), top_k, norm_topk_prob=norm_topk_prob)
        out = np.zeros_like(x)
        for expert in range(len(gate)):
            tokens, slots = np.nonzero(experts == expert)
            hidden = self.gated_linear(x[tokens], gate[expert], up[expert], activation=activation)
            share = weights[tokens, slots][:, None]
            out[tokens] += share * self.linear(hidden, down[expert])
        return out

    def gather_rows(self, x: Float32Array, batch: ReferenceBatch) -> Float32Array:
        """See ``Ops.gather_rows``."""
        return x[batch.logits_indices]

    def logits(
        self, x: Float32Array, weight: ReferenceWeight, *, softcap: float = 0.0
    ) -> Float32Array:
        """See ``Ops.logits``."""
        return cap_logits(self.linear(x, weight), softcap)

    def _rope_rows(
        self, rope: RopeConfig, positions: NDArray[Any]
    ) -> tuple[Float32Array, Float32Array]:
        needed = int(positions.max()) + 1
        if rope not in self._tables or len(self._tables[rope][0]) < needed:
            self._tables[rope] = rope_tables(rope, 2 * needed)
        cos, sin = self._tables[rope]
        return cos[positions], sin[positions]
