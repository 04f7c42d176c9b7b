"""How the engine runs. Every field has a command-line twin; ``entrypoints`` resolves the Nones."""

from __future__ import annotations

from typing import Literal

import msgspec

KVCacheDtype = Literal["auto", "bf16", "fp16", "fp32"]
LinearPrecision = Literal["auto", "int8", "bf16"]
SchedulingPolicy = Literal["fcfs", "priority"]
RunnerType = Literal["auto", "generate", "pooling"]
ConvertType = Literal["auto", "none", "embed"]

DEFAULT_PREFILL_BURST_TOKENS = 8192
"""Of an engine. A recording that says nothing of it was made without."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Budgets and policies of the scheduler."""

    max_num_batched_tokens: int
    """Token budget of one step."""
    max_num_seqs: int
    """Requests running at once."""
    max_model_len: int
    """Longest sequence, prompt and output together."""
    policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool = True
    """Plan step k while step k-1 runs (batch queue of 2)."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step while others wait or run; 0 = no cap."""
    prefill_burst_tokens: int = 0
    """Tokens of steps in a row in which newcomers go first, while many of them wait and few
    requests stream, ``fcfs`` only; 0 = requests that run always go first."""
    crowd_step_tokens: int = 0
    """Token budget of such a step, if larger: nobody's next token waits for it longer than for the
    same prompts in several steps."""
    full_sequence_must_fit: bool = True
    """Admit a request only when blocks for all its known tokens are free."""

    @property
    def largest_step(self) -> int:
        """Most tokens that any step has."""
        return max(self.max_num_batched_tokens, self.crowd_step_tokens)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    num_blocks: int
    """Blocks of the pool, the null block (id 0) included."""
    block_size: int = 16
    """Tokens of one block."""
    enable_prefix_caching: bool = True
    watermark: float = 0.0
    """Share of the blocks that stays free when a request is admitted beside running ones."""
    enable_kv_cache_events: bool = False
    """Tell clients which content was stored and removed."""
    sliding_window: int | None = None
    """Set only if EVERY layer has this window: blocks behind it are freed."""


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU backend."""

    num_threads: int
    """Compute threads, the engine thread included."""
    isa: str
    """Chosen kernels: scalar, avx2, avx512, amx, neon."""
    kv_cache_dtype: KVCacheDtype = "auto"
    linear_precision: LinearPrecision = "auto"
    """Activations of quantised layers: int8 in groups of 32, or bf16 (exact path)."""
