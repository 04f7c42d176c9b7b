"""Llama 2 and 3, SmolLM2 (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from twostep.models.decoder import CausalLM, FeedForward, Layer, MixtureOfExperts
from twostep.models.loader.weights import WeightLoader
from twostep.ops.protocol import FlatBatch, Ops, Queries, Tensor


class LlamaLayer(Layer):
    """Norm, attention, residual; norm, feed-forward, residual."""

    def __init__(self, weights: WeightLoader, layer: int) -> None:
        super().__init__(weights, layer)
        name = f"model.layers.{layer}.post_attention_layernorm"
        self.mlp_norm = weights.vector(name, weights.config.hidden_size)
        self.mlp = self.feed_forward(weights, layer)

    def feed_forward(self, weights: WeightLoader, layer: int) -> FeedForward | MixtureOfExperts:
        """What stands behind the second norm."""
        return FeedForward(weights, layer)

    def finish(
        self, ops: Ops, hidden: Tensor, queries: Queries, batch: FlatBatch, *, sampled: bool = False
    ) -> Tensor:
        """See ``Layer.finish``."""
        x = self.attention.attend(ops, queries, batch, sampled=sampled)
        hidden = ops.add(hidden, x)
        x = ops.rms_norm(hidden, self.mlp_norm, eps=self.eps)
        return ops.add(hidden, self.mlp(ops, x))


class LlamaForCausalLM(CausalLM):
    """Llama; Llama 3's stretched rotary frequencies come with ``RopeConfig``."""

    layer_class = LlamaLayer
