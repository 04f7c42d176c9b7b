"""Assembles the real engine core on a simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twostep.config.engine import (
    DEFAULT_PREFILL_BURST_TOKENS,
    CacheConfig,
    SchedulerConfig,
    SchedulingPolicy,
)
from twostep.contracts.clock import Clock
from twostep.contracts.errors import UsageError
from twostep.contracts.executor import Executor
from twostep.contracts.observer import StepObserver
from twostep.engine.core import EngineCore
from twostep.kv_cache.sizing import KVCacheSizing
from twostep.sim.clock import VirtualClock
from twostep.sim.defaults import (
    BLOCK_SIZE,
    GPU_MEMORY_UTILIZATION,
    Budgets,
    UsageContext,
    default_budgets,
    memory_budget,
    size_device_kv_cache,
)
from twostep.sim.device import SimDevice, find_device
from twostep.sim.executor import SimExecutor
from twostep.sim.model_facts import ModelFacts, load_model_facts
from twostep.sim.step_cost import StepCostModel

Observe = Callable[[Executor, Clock, SchedulerConfig, CacheConfig], StepObserver | None]
"""What a core is built with, to its observer."""


def plan_sizes(
    facts: ModelFacts,
    device: SimDevice,
    *,
    usage: UsageContext = "api",
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    kv_cache_memory_bytes: int | None = None,
    block_size: int = BLOCK_SIZE,
    tensor_parallel_size: int = 1,
    policy: SchedulingPolicy = "fcfs",
    async_scheduling: bool = True,
    enable_chunked_prefill: bool = True,
    long_prefill_token_threshold: int = 0,
    prefill_burst_tokens: int = DEFAULT_PREFILL_BURST_TOKENS,
) -> tuple[SchedulerConfig, KVCacheSizing]:
    """Budgets and KV cache of an engine on this device; None means the device's default.

    Raises:
        OutOfMemoryError: Weights, or one request of ``max_model_len``, do not fit.
        UsageError: The device can't compute in the model's number type, heads can't be shared out
            evenly, or ``max_model_len`` is more than the model was trained for.
    """
    device.flops(facts.compute_dtype)  # before the sizes: fewer bytes are no cure for it
    if facts.config.num_heads % tensor_parallel_size:
        raise UsageError(
            f"--tensor-parallel-size {tensor_parallel_size}: {facts.config.num_heads} attention "
            "heads cannot be shared out evenly; choose a divisor"
        )
    longest = facts.config.max_position
    if max_model_len is not None and max_model_len > longest:
        raise UsageError(
            f"--max-model-len {max_model_len}: the model was trained for {longest} tokens; "
            "ask for that or less"
        )
    max_model_len = max_model_len or longest
    default = default_budgets(device, usage)
    seqs = max_num_seqs or default.max_num_seqs
    tokens = max_num_batched_tokens or default.max_num_batched_tokens
    if not enable_chunked_prefill:
        tokens = max(tokens, max_model_len)
    budgets = Budgets(min(tokens, seqs * max_model_len), min(seqs, tokens))
    memory = memory_budget(
        facts,
        device,
        budgets,
        gpu_memory_utilization=gpu_memory_utilization,
        tensor_parallel_size=tensor_parallel_size,
    )
    sizing = size_device_kv_cache(
        facts,
        memory,
        budgets,
        max_model_len=max_model_len,
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=budgets.max_num_batched_tokens,
        max_num_seqs=budgets.max_num_seqs,
        max_model_len=max_model_len,
        policy=policy,
        async_scheduling=async_scheduling,
        enable_chunked_prefill=enable_chunked_prefill,
        long_prefill_token_threshold=long_prefill_token_threshold,
        prefill_burst_tokens=prefill_burst_tokens,
    )
    return scheduler_config, sizing


def build_sim_core(
    model: str | ModelFacts,
    device: str | SimDevice,
    *,
    enable_prefix_caching: bool = True,
    tensor_parallel_size: int = 1,
    num_spec_tokens: int = 0,
    observe: Observe | None = None,
    executor_options: dict[str, Any] | None = None,
    **sizes: Any,
) -> tuple[EngineCore, SimExecutor, VirtualClock]:
    """The engine core of ``model`` on ``device``, in virtual time.

    ``model``: facts, or what :func:`load_model_facts` takes. ``sizes``: see :func:`plan_sizes`.
    ``observe``: makes the core's observer, once there is what it needs.
    ``executor_options``: see :class:`SimExecutor` (``next_token``, ``history``, ...).
    """
    facts = load_model_facts(model) if isinstance(model, str) else model
    device = find_device(device) if isinstance(device, str) else device
    scheduler_config, sizing = plan_sizes(
        facts, device, tensor_parallel_size=tensor_parallel_size, **sizes
    )
    windows = list(facts.windows)
    cache_config = CacheConfig(
        num_blocks=sizing.num_blocks,
        block_size=sizing.block_size,
        enable_prefix_caching=enable_prefix_caching,
        sliding_window=windows[0] if len(windows) == 1 else None,
    )
    clock = VirtualClock()
    executor = SimExecutor(
        StepCostModel(facts, device, tensor_parallel_size=tensor_parallel_size),
        scheduler_config,
        cache_config,
        clock,
        max_concurrent_batches=2 if scheduler_config.async_scheduling else 1,
        num_spec_tokens=num_spec_tokens,
        **(executor_options or {}),
    )
    core = EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=executor,
        clock=clock,
        num_spec_tokens=num_spec_tokens,
        observer=(observe(executor, clock, scheduler_config, cache_config) if observe else None),
    )
    return core, executor, clock
