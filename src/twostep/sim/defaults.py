"""What an engine chooses on a device when nobody says otherwise: budgets and KV cache."""

from __future__ import annotations

from typing import Literal

import msgspec

from twostep.contracts.errors import OutOfMemoryError
from twostep.kv_cache.sizing import KVCacheSizing, kv_block_bytes, size_kv_cache
from twostep.sim.device import GIB, SimDevice
from twostep.sim.model_facts import KV_BYTES, ModelFacts

UsageContext = Literal["api", "offline"]

GPU_MEMORY_UTILIZATION = 0.92
BLOCK_SIZE = 16


class Budgets(msgspec.Struct, frozen=True):
    """Size of a step."""

    max_num_batched_tokens: int
    max_num_seqs: int


def default_budgets(device: SimDevice, usage: UsageContext) -> Budgets:
    """vLLM's defaults by kind and memory of the device: a server keeps its steps shorter."""
    is_api = usage == "api"
    if device.is_cpu:
        return Budgets(2048, 128) if is_api else Budgets(4096, 256)
    if device.memory_bytes >= 160 * GIB:
        return Budgets(16384, 1024)
    if device.memory_bytes >= 70 * GIB and not device.is_a100:
        return Budgets(8192 if is_api else 16384, 1024)
    return Budgets(2048 if is_api else 8192, 256)


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of one device goes, in bytes."""

    total: int
    usable: int
    """``gpu_memory_utilization`` of the total."""
    weights: int
    activations: int
    """The largest step's intermediate values and logits."""

    @property
    def kv_cache(self) -> int:
        """What is left; negative if the weights do not fit."""
        return self.usable - self.weights - self.activations


def memory_budget(
    facts: ModelFacts,
    device: SimDevice,
    budgets: Budgets,
    *,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    tensor_parallel_size: int = 1,
) -> MemoryBudget:
    """Memory of each device of a group.

    The largest step holds, for each token, residual stream, normed input, and the wider of qkv with
    attention's output and the MLP's gate, up and product, in two bytes; for each request one row of
    logits in four bytes, twice.
    """
    c = facts.config
    attention = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    mlp = 3 * max(c.intermediate_size, c.num_experts_per_token * c.moe_intermediate_size)
    per_token = 2 * (2 * c.hidden_size + max(attention, mlp) // tensor_parallel_size)
    logits = budgets.max_num_seqs * c.vocab_size * 4 * 2 // tensor_parallel_size
    return MemoryBudget(
        total=device.memory_bytes,
        usable=int(device.memory_bytes * gpu_memory_utilization),
        weights=facts.weight_bytes // tensor_parallel_size,
        activations=budgets.max_num_batched_tokens * per_token + logits,
    )


def block_bytes(facts: ModelFacts, block_size: int, tensor_parallel_size: int = 1) -> int:
    """Bytes of one KV block on each device; a KV head is never cut."""
    c = facts.config
    return kv_block_bytes(
        block_size=block_size,
        num_layers=c.num_layers,
        num_kv_heads=max(1, c.num_kv_heads // tensor_parallel_size),
        head_dim=c.head_dim,
        dtype_bytes=KV_BYTES[facts.kv_dtype],
    )


def size_device_kv_cache(
    facts: ModelFacts,
    memory: MemoryBudget,
    budgets: Budgets,
    *,
    max_model_len: int,
    block_size: int = BLOCK_SIZE,
    tensor_parallel_size: int = 1,
    kv_cache_memory_bytes: int | None = None,
) -> KVCacheSizing:
    """KV blocks in what is left of the memory, or in ``kv_cache_memory_bytes``.

    Raises OutOfMemoryError, with the numbers, if the weights or one request do not fit.
    """
    if memory.kv_cache <= 0:
        raise OutOfMemoryError(
            f"{facts.name} needs {memory.weights / GIB:.1f} GiB of weights and "
            f"{memory.activations / GIB:.1f} GiB of buffers on each device, which has "
            f"{memory.usable / GIB:.1f} GiB to use: take a larger device, a smaller --dtype or "
            "more of --tensor-parallel-size"
        )
    windows = list(facts.windows)
    return size_kv_cache(
        block_bytes=block_bytes(facts, block_size, tensor_parallel_size),
        block_size=block_size,
        available_bytes=memory.kv_cache,
        max_model_len=max_model_len,
        max_num_seqs=budgets.max_num_seqs,
        requested_bytes=kv_cache_memory_bytes,
        sliding_window=windows[0] if len(windows) == 1 else None,
        max_in_flight_tokens=2 * budgets.max_num_batched_tokens,
    )
