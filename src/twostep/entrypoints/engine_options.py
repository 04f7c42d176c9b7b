"""What a user may set about an engine. Needs nothing heavy: the API process has it too."""

from __future__ import annotations

import msgspec

from twostep.config.engine import (
    DEFAULT_PREFILL_BURST_TOKENS,
    ConvertType,
    KVCacheDtype,
    LinearPrecision,
    RunnerType,
    SchedulingPolicy,
)
from twostep.contracts.pooling import PoolingType


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may set; None means: find out what is best here."""

    runner: RunnerType = "auto"
    """Generate text, or make embeddings (``pooling``); ``auto``: what the checkpoint is for."""
    convert: ConvertType = "auto"
    """``embed``: make embeddings with a model that generates."""
    pooling_type: PoolingType | None = None
    """How the hidden states of a text become one vector."""
    normalize: bool | None = None
    """Whether vectors have length 1."""
    quantization: str | None = None
    linear_precision: LinearPrecision = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0
    prefill_burst_tokens: int = DEFAULT_PREFILL_BURST_TOKENS
    watermark: float = 0.0
    enforce_eager: bool = False
    threads: int | None = None
    trace: str | None = None
    """File for a Chrome/Perfetto trace of every step."""
    record: str | None = None
    """File for a recording that ``twostep replay`` runs again."""
