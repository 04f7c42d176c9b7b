"""What a model is, whatever file it came from."""

from __future__ import annotations

from typing import Literal

import msgspec

Activation = Literal["silu", "gelu_tanh"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: angles are ``position * inv_freq``."""

    theta: float
    rotary_dim: int
    """Dimensions of each head that rotate; less than head_dim when partial."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None = 0.1 ln(factor) + 1."""
    freq_factors: tuple[float, ...] = ()
    """Divide the frequency of each pair (``rope_freqs.weight`` of GGUF files); empty = all 1."""
    interleaved: bool = False
    """Pairs are (2i, 2i+1) instead of (i, i + rotary_dim/2). GGUF files of the Llama family store
    q and k permuted for interleaved pairs."""


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What may differ from layer to layer."""

    rope: RopeConfig | None
    """None: positions are added to the embeddings instead."""
    sliding_window: int | None = None
    """A query at position p sees keys p - window + 1 .. p."""
    is_moe: bool = False


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer, in plain numbers."""

    architecture: str
    """File name in ``models``: llama, mistral, qwen2, qwen3, gemma3, qwen3_moe, bert."""
    vocab_size: int
    """Rows of the embedding table."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position: int
    """Longest context the model was trained for."""
    rms_norm_eps: float = 1e-5
    activation: Activation = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """q, k, v have biases (Qwen2)."""
    attention_scale: float = 0.0
    """Multiplies q·k; 0 means head_dim ** -0.5."""
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    qk_norm: bool = False
    """RMSNorm on each head of q and k before rope (Qwen3, Gemma 3)."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    is_encoder: bool = False
    """Every token sees the whole text, and there are no logits (BERT)."""
    layer_norm_eps: float = 1e-12
    """Of models that norm with mean and variance."""
    num_token_types: int = 0
    """Rows of the table of segments; a text is segment 0."""

    @property
    def scale(self) -> float:
        """What multiplies q·k."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)
