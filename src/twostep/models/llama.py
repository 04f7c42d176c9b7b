"""Llama 2 and 3, SmolLM2 (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from twostep.models.decoder import Attention, CausalLM, FeedForward
from twostep.models.loader.weights import WeightLoader
from twostep.ops.protocol import FlatBatch, Ops, Queries, Tensor


class LlamaLayer:
    """Norm, attention, residual; norm, feed-forward, residual."""

    def __init__(self, weights: WeightLoader, layer: int) -> None:
        config, prefix = weights.config, f"model.layers.{layer}"
        self.eps = config.rms_norm_eps
        self.input_norm = weights.vector(f"{prefix}.input_layernorm", config.hidden_size)
        self.attention = Attention(weights, layer)
        self.mlp_norm = weights.vector(f"{prefix}.post_attention_layernorm", config.hidden_size)
        self.mlp = FeedForward(weights, layer)

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
        hidden = ops.add(hidden, x)
        x = ops.rms_norm(hidden, self.mlp_norm, eps=self.eps)
        return ops.add(hidden, self.mlp(ops, x))


class LlamaForCausalLM(CausalLM):
    """Llama; Llama 3's stretched rotary frequencies come with ``RopeConfig``."""

    layer_class = LlamaLayer
