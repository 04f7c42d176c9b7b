"""Gemma 3, text (Gemma Team 2025)."""

from __future__ import annotations

from twostep.models.decoder import CausalLM, FeedForward, Layer
from twostep.models.loader.weights import WeightLoader
from twostep.ops.protocol import FlatBatch, Ops, Queries, Tensor


class Gemma3Layer(Layer):
    """Attention and feed-forward, each between two norms, each with a residual around it.

    Five of six layers see a window and rotate by local frequencies, the sixth sees everything:
    ``LayerConfig`` has both.
    """

    def __init__(self, weights: WeightLoader, layer: int) -> None:
        super().__init__(weights, layer)
        hidden, prefix = weights.config.hidden_size, f"model.layers.{layer}"
        self.attention_norm = weights.vector(f"{prefix}.post_attention_layernorm", hidden)
        self.pre_mlp_norm = weights.vector(f"{prefix}.pre_feedforward_layernorm", hidden)
        self.mlp = FeedForward(weights, layer)
        self.mlp_norm = weights.vector(f"{prefix}.post_feedforward_layernorm", hidden)

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
