"""What a model's steps need of a machine, and how fast they can be at most: a roofline.

A step can be no faster than its bytes at the measured read bandwidth, nor than its operations at
the measured rates of the arithmetic that they are done in (Williams, Waterman, Patterson 2009).
Bytes and operations are counted from the model's real weights; activations, logits and norms are
left out: they are small and stay in caches. A multiplication and an addition are two operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from twostep.models.loader.checkpoint import Checkpoint
from twostep.models.loader.weights import quantization_format, stored_format
from twostep.ops.formats import FORMATS, packed_bytes
from twostep.sim.model_facts import KV_BYTES, ModelFacts
from twostep.sim.step_cost import visible_pairs

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

Operations = dict[str, float]
"""By kind of arithmetic: int8, bf16, fp32."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Of one or several steps."""

    num_bytes: float
    """Read from memory."""
    operations: Mapping[str, float]
    """By kind of arithmetic."""

    @property
    def total_operations(self) -> float:
        """Of all kinds."""
        return sum(self.operations.values())

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.total_operations / self.num_bytes


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine was measured to do."""

    bandwidth: float
    """Bytes read per second."""
    rates: Mapping[str, float]
    """Operations per second, by kind of arithmetic."""

    def seconds(self, work: Work) -> tuple[float, str]:
        """(least time, what binds it: ``memory`` or ``arithmetic``)."""
        reading = work.num_bytes / self.bandwidth
        computing = sum(count / self.rates[kind] for kind, count in work.operations.items())
        return max(reading, computing), "memory" if reading >= computing else "arithmetic"


class _Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """One weight matrix, or a part of a mixture of experts."""

    num_bytes: int
    num_weights: int
    kind: str
    is_sampled: bool
    """Whether only sampled rows meet it."""
    is_expert: bool


class ModelWork:
    """Counts the work of a model's steps."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        quantization: str | None = None,
        exact: bool = False,
        kv_dtype: str = "bf16",
        has_bf16_dot: bool = True,
    ) -> None:
        """``exact``: activations are not quantised (``--linear-precision bf16``).

        ``has_bf16_dot``: the kernels have bf16 arithmetic, for bf16 weights and a bf16 KV cache;
        else they widen to float32.
        """
        self._facts = ModelFacts(name="", config=checkpoint.config, kv_dtype=kv_dtype)
        self._config = checkpoint.config
        self._kv_bytes = KV_BYTES[kv_dtype]
        self._attention_kind = "bf16" if kv_dtype == "bf16" and has_bf16_dot else "fp32"
        target = quantization_format(quantization)
        self._matrices = [
            _matrix(checkpoint, name, target, exact, has_bf16_dot)
            for name in sorted(checkpoint.names)
            if _is_streamed(checkpoint, name)
        ]

    def decode(self, batch: int, context: int) -> Work:
        """One step of ``batch`` sequences, each with ``context`` tokens before it."""
        return self._step(batch, [(context, 1)] * batch, num_logits=batch)

    def prefill(self, num_tokens: int, budget: int) -> Work:
        """A prompt, in steps of at most ``budget`` tokens; the last one makes logits."""
        num_bytes, operations = 0.0, Operations()
        for start in range(0, num_tokens, budget):
            count = min(budget, num_tokens - start)
            is_last = start + count == num_tokens
            step = self._step(count, [(start, count)], num_logits=int(is_last))
            num_bytes += step.num_bytes
            for kind, number in step.operations.items():
                operations[kind] = operations.get(kind, 0.0) + number
        return Work(num_bytes=num_bytes, operations=operations)

    def _step(self, num_tokens: int, requests: list[tuple[int, int]], num_logits: int) -> Work:
        """``requests``: (tokens computed before, tokens of this step)."""
        num_bytes, operations = 0.0, Operations()
        for matrix in self._matrices:
            rows = num_logits if matrix.is_sampled else num_tokens
            if rows == 0:
                continue
            read, used = self._expert_shares(num_tokens) if matrix.is_expert else (1.0, 1.0)
            num_bytes += read * matrix.num_bytes
            count = 2.0 * rows * used * matrix.num_weights
            operations[matrix.kind] = operations.get(matrix.kind, 0.0) + count
        kv_bytes, kv_operations = self._attention(requests, num_logits)
        operations[self._attention_kind] = operations.get(self._attention_kind, 0) + kv_operations
        return Work(num_bytes=num_bytes + kv_bytes, operations=operations)

    def _expert_shares(self, num_tokens: int) -> tuple[float, float]:
        """(share of experts that some token chose, if tokens choose evenly; share a token uses)."""
        share = self._config.num_experts_per_token / self._config.num_experts
        return 1 - (1 - share) ** num_tokens, share

    def _attention(self, requests: list[tuple[int, int]], num_logits: int) -> tuple[float, float]:
        """Bytes of keys and values read, and operations, over all layers.

        In the last one only the logits rows attend: the last token of all requests, or none.
        """
        import numpy as np

        computed = np.array([before for before, _ in requests], dtype=np.int64)
        scheduled = np.array([count for _, count in requests], dtype=np.int64)
        one = np.ones_like(scheduled)
        keys_before_last = computed + scheduled - one
        num_bytes = operations = 0.0
        for window, layers in self._facts.windows.items():
            pairs = int(visible_pairs(computed, scheduled, window).sum())
            keys = computed + scheduled
            if window is not None:
                keys = np.minimum(keys, scheduled + (window - 1))
            flops, kv_bytes = self._facts.flops_per_pair, self._facts.kv_bytes_per_layer
            if window == self._config.layers[-1].sliding_window:
                layers -= 1
                if num_logits:
                    operations += flops * int(visible_pairs(keys_before_last, one, window).sum())
                    num_bytes += kv_bytes * int(keys.sum())
            operations += layers * flops * pairs
            num_bytes += layers * kv_bytes * int(keys.sum())
        return num_bytes, operations


def _is_streamed(checkpoint: Checkpoint, name: str) -> bool:
    """Whether steps read the whole tensor: not norms, nor a table that only lends single rows."""
    if len(checkpoint.tensor(name).shape) != 2:
        return False
    return name != EMBEDDING or checkpoint.config.tie_word_embeddings


def _is_behind_last_keys(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the matrix is of the last layer's second half, which only sampled rows go through."""
    is_last = name.startswith(f"model.layers.{checkpoint.config.num_layers - 1}.")
    return is_last and name.split(".")[-2] not in ("q_proj", "k_proj", "v_proj")


def _matrix(
    checkpoint: Checkpoint, name: str, target: str | None, exact: bool, has_bf16_dot: bool
) -> _Matrix:
    raw = checkpoint.tensor(name)
    stored = stored_format(raw, target)
    if FORMATS[stored].is_quantized and not exact:
        kind = "int8"
    else:
        kind = "bf16" if stored == "BF16" and has_bf16_dot else "fp32"
    return _Matrix(
        num_bytes=packed_bytes(stored, raw.shape),
        num_weights=math.prod(raw.shape),
        kind=kind,
        is_sampled=name in (EMBEDDING, OUTPUT) or _is_behind_last_keys(checkpoint, name),
        is_expert=".experts." in name,
    )
