"""Models that can be simulated without a file: the numbers of their ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LLAMA_3_1: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-3.1-8b": {
            **_LLAMA_3_1,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        "llama-3.1-70b": {
            **_LLAMA_3_1,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        "qwen3-8b": {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
        },
    }
)
"""By the name that users type; also found as ``org/Name`` and ``Name-Instruct``."""


def known_name(name: str) -> str | None:
    """The key of :data:`KNOWN_MODELS` that a user means, or None."""
    short = name.rpartition("/")[2].lower().removesuffix("-instruct")
    return short if short in KNOWN_MODELS else None
