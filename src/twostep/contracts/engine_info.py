"""What a running engine is, told once when it is ready."""

from __future__ import annotations

import msgspec

from twostep.contracts.pooling import Pooler


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that front end, server and metrics need; nothing in it changes while it runs."""

    model: str
    """As the user called it."""
    model_path: str
    """Where it lies."""
    architecture: str
    quantization: str | None = None
    """What float weights were quantised to while loading; None = as in the file."""
    num_parameters: int | None = None
    weight_bytes: int = 0
    """Packed, in memory."""
    vocab_size: int
    """Rows of the embedding table."""
    max_model_len: int
    """Longest sequence, prompt and answer together."""
    block_size: int
    """Tokens of a KV block."""
    num_gpu_blocks: int
    """KV blocks that requests can use (vLLM's name; they lie on whatever the device is)."""
    kv_cache_dtype: str
    enable_prefix_caching: bool = True
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    heartbeat_timeout: float = 10.0
    """Seconds without progress after which the core counts as hung."""
    version: str
    """Of twostep."""
    pooler: Pooler | None = None
    """Set if the engine makes embeddings; it generates no text then."""
    boot: list[tuple[str, str]] = []
    """Rows of the boot table: (label, text)."""
