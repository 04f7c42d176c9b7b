"""Gemma 3, text (Gemma Team 2025)."""

from __future__ import annotations

from twostep.models.decoder import Attention, CausalLM, FeedForward
from twostep.models.loader.weights import WeightLoader
from twostep.ops.protocol import FlatBatch, Ops, Queries, Tensor


class Gemma3Layer:
    """Attention and feed-forward, each between two norms, each with a residual around it.

    Five of six layers see a window and rotate by local frequencies, the sixth sees everything:
    ``LayerConfig`` has both.
    """

    def __init__(self, weights: WeightLoader, layer: int) -> None:
        config, prefix = weights.config, f"model.layers.{layer}"
        hidden = config.hidden_size
        self.eps = config.rms_norm_eps
        self.input_norm = weights.vector(f"{prefix}.input_layernorm", hidden)
        self.attention = Attention(weights, layer)
        self.attention_norm = weights.vector(f"{prefix}.post_attention_layernorm", hidden)
        self.pre_mlp_norm = weights.vector(f"{prefix}.pre_feedforward_layernorm", hidden)
        self.mlp = FeedForward(weights, layer)
        self.mlp_norm = weights.vector(f"{prefix}.post_feedforward_layernorm", hidden)

    def cache(
        self, ops: Ops, hidden: Tensor, batch: FlatBatch, *, may_sample: bool = False
    ) -> Queries:
        """See ``Layer.cache``."""
        x = ops.rms_norm(hidden, self.input_norm, eps=self.eps)
        return self.attention.cache(ops, x, batch, may_sample=may_sample)

    def finish(
        self, ops: Ops, hidden: Tensor, queries: Queries, batch: FlatBatch, *, sampled: bool = False
    ) -> Tensor:
        """See ``Layer.finish``."""
        x = self.attention.attend(ops, queries, batch, sampled=sampled)
        hidden = ops.add(hidden, ops.rms_norm(x, self.attention_norm, eps=self.eps))
        x = ops.rms_norm(hidden, self.pre_mlp_norm, eps=self.eps)
        x = self.mlp(ops, x)
        return ops.add(hidden, ops.rms_norm(x, self.mlp_norm, eps=self.eps))


class Gemma3ForCausalLM(CausalLM):
    """Embeddings are scaled by sqrt(hidden_size); q and k are normed per head."""

    layer_class = Gemma3Layer
