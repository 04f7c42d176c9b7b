"""Qwen 3, mixture of experts (Yang et al. 2025)."""

from __future__ import annotations

from twostep.models.decoder import CausalLM, FeedForward, MixtureOfExperts
from twostep.models.llama import LlamaLayer
from twostep.models.loader.weights import WeightLoader


class Qwen3MoeLayer(LlamaLayer):
    """Llama's layer with experts, but for the layers that have one dense feed-forward."""

    def feed_forward(self, weights: WeightLoader, layer: int) -> FeedForward | MixtureOfExperts:
        """See ``LlamaLayer.feed_forward``."""
        is_moe = weights.config.layers[layer].is_moe
        return MixtureOfExperts(weights, layer) if is_moe else FeedForward(weights, layer)


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen 3 whose feed-forward layers are mixtures of experts."""

    layer_class = Qwen3MoeLayer
