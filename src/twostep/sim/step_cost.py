"""How long a device computes a step: a roofline, term by term.

A matrix product takes as long as its arithmetic or as its weights' way from memory, whichever is
longer; so does attention with its keys and values. Terms are added: nothing of one is hidden behind
another. Host time is not in here (see ``SimExecutor``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostep.runner.graphs import BatchDescriptor, GraphMode
from twostep.sim.device import SimDevice
from twostep.sim.model_facts import ModelFacts

Int64Array = NDArray[np.int64]

SAMPLER_KERNELS = 3
"""Gather the rows, logits, sampler: launched on their own after the forward pass."""
LOGIT_BYTES = 4
SAMPLER_PASSES = 2
"""Times the sampler goes over a row of logits: written, read."""
ACTIVATION_BYTES = 2
REDUCES_PER_LAYER = 2
"""Sums over a tensor-parallel group: after attention's and after the MLP's output."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step on one device of its group, and what they were computed from."""

    weights: float
    """Matrix products of the layers, bound by reading the weights; else 0."""
    compute: float
    """Matrix products of the layers, bound by arithmetic; else 0."""
    attention: float
    logits: float
    """Matrix product that makes logits."""
    sampling: float
    launch: float
    """Launches of kernels and graphs, and gaps between the kernels of a graph."""
    communication: float
    """Sums over the tensor-parallel group."""
    layer_flops: int
    layer_weight_bytes: int
    attention_flops: int
    kv_bytes: int
    """Keys and values read and written."""
    num_launches: int

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return (
            self.weights
            + self.compute
            + self.attention
            + self.logits
            + self.sampling
            + self.launch
            + self.communication
        )


class StepCostModel:
    """Costs of one model on one kind of device."""

    def __init__(
        self, facts: ModelFacts, device: SimDevice, *, tensor_parallel_size: int = 1
    ) -> None:
        """Raises UsageError if the device can't compute in the model's number type."""
        self.facts = facts
        self.device = device
        self.tensor_parallel_size = tensor_parallel_size
        self._flops = device.flops(facts.compute_dtype) * tensor_parallel_size
        self._bandwidth = device.bandwidth * tensor_parallel_size
        # Attention is computed in the KV cache's own type only where there is arithmetic for it.
        kv_dtype = facts.kv_dtype if facts.kv_dtype in device.peak_flops else facts.compute_dtype
        # A KV head is never cut: devices beyond their number read copies of their own.
        self._kv_copies = max(1, tensor_parallel_size // facts.config.num_kv_heads)
        self._windows = list(facts.windows.items())
        self._attention_flops = device.flops(kv_dtype) * tensor_parallel_size

    def predict(
        self,
        graph: BatchDescriptor,
        num_scheduled: Sequence[int] | NDArray[np.int32],
        num_computed: Sequence[int] | NDArray[np.int32],
        num_logits: int,
    ) -> StepCost:
        """Cost of a batch that runs as ``graph``.

        ``num_scheduled``, ``num_computed``: tokens of each request in this step and before it;
        ``num_logits``: rows that get logits. Matrix products see the padded number of tokens. The
        last layer counts as any other, though only logits rows are finished there: of L layers,
        a prefill is predicted up to 1/L too long.
        """
        facts = self.facts
        attention_flops, kv_bytes = self._attention(
            np.asarray(num_computed, dtype=np.int64), np.asarray(num_scheduled, dtype=np.int64)
        )
        layer_flops = graph.num_tokens * facts.layer_flops_per_token
        weight_bytes = facts.streamed_layer_bytes(graph.num_tokens)
        arithmetic, streaming = layer_flops / self._flops, weight_bytes / self._bandwidth
        launch, num_launches = self._launches(graph.mode)
        logits_bytes = num_logits * facts.config.vocab_size * LOGIT_BYTES * SAMPLER_PASSES
        return StepCost(
            weights=streaming if streaming >= arithmetic else 0.0,
            compute=arithmetic if streaming < arithmetic else 0.0,
            attention=max(attention_flops / self._attention_flops, kv_bytes / self._bandwidth),
            logits=max(
                num_logits * facts.logits_flops_per_row / self._flops,
                facts.logits_weight_bytes / self._bandwidth,
            ),
            sampling=logits_bytes / self.device.bandwidth,
            launch=launch,
            communication=self._communication(graph.num_tokens),
            layer_flops=layer_flops,
            layer_weight_bytes=weight_bytes,
            attention_flops=attention_flops,
            kv_bytes=kv_bytes,
            num_launches=num_launches,
        )

    def _attention(self, computed: Int64Array, scheduled: Int64Array) -> tuple[int, int]:
        """Operations, and bytes of KV read and written, over all layers and requests."""
        flops = num_bytes = 0
        for window, layers in self._windows:
            pairs = int(visible_pairs(computed, scheduled, window).sum())
            flops += layers * self.facts.flops_per_pair * pairs
            keys = computed + scheduled
            if window is not None:
                keys = np.minimum(keys, scheduled + (window - 1))
            num_bytes += layers * self.facts.kv_bytes_per_layer * int((keys + scheduled).sum())
        return flops, num_bytes * self._kv_copies

    def _launches(self, mode: GraphMode) -> tuple[float, int]:
        """Seconds and number of launches of a step."""
        device, kernels = self.device, self.facts.num_kernels
        layers = self.facts.config.num_layers
        if mode is GraphMode.NONE:
            graphs, alone = 0, kernels
        elif mode is GraphMode.PIECEWISE:
            graphs, alone = layers + 1, layers
        else:
            graphs, alone = 1, 0
        inside = kernels - alone if graphs else 0
        alone += SAMPLER_KERNELS
        seconds = (
            graphs * device.graph_launch
            + inside * device.graph_kernel
            + alone * device.kernel_launch
        )
        return seconds, graphs + alone

    def _communication(self, num_tokens: int) -> float:
        """A ring: each device sends and receives 2 (n-1)/n of the activations, twice a layer."""
        n = self.tensor_parallel_size
        if n == 1:
            return 0.0
        config = self.facts.config
        num_bytes = num_tokens * config.hidden_size * ACTIVATION_BYTES * 2 * (n - 1) / n
        once = num_bytes / self.device.link_bandwidth + self.device.link_latency
        return REDUCES_PER_LAYER * config.num_layers * once


def visible_pairs(computed: Int64Array, scheduled: Int64Array, window: int | None) -> Int64Array:
    """[B] (query, key) pairs of ``scheduled`` tokens that follow ``computed`` ones.

    Each query sees itself and what is before it; at most ``window`` keys.
    """
    if window is None:
        return scheduled * computed + scheduled * (scheduled + 1) // 2
    growing: Int64Array = np.clip(window - computed, 0, scheduled)  # queries that see everything
    pairs: Int64Array = growing * computed + growing * (growing + 1) // 2
    pairs += window * (scheduled - growing)
    return pairs
