"""The parts that decoder-only transformers share: attention, feed-forward, the frame around them.

Each part loads its own weights and applies itself; the files beside this one put them together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from twostep.config.model import ModelConfig
from twostep.models.loader.weights import WeightLoader
from twostep.ops.protocol import AttentionSpec, Carried, FlatBatch, Ops, Queries, Tensor


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions.

    q, k and v are one matrix. Biases and per-head norms are there if the configuration says so.
    """

    def __init__(self, weights: WeightLoader, layer: int) -> None:
        config, prefix = weights.config, f"model.layers.{layer}.self_attn"
        self.spec = _attention_spec(config, layer)
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        rows = [width, kv_width, kv_width]
        self.qkv = weights.linear(names, rows, hidden)
        self.qkv_bias = weights.biases(names, rows) if config.attention_bias else None
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = weights.vector(f"{prefix}.q_norm", config.head_dim)
            self.k_norm = weights.vector(f"{prefix}.k_norm", config.head_dim)
        output = f"{prefix}.o_proj"
        self.output = weights.linear([output], [hidden], width)
        has_bias = weights.has(output, "bias")
        self.output_bias = weights.biases([output], [hidden]) if has_bias else None

    def cache(self, ops: Ops, x: Tensor, batch: FlatBatch, *, may_sample: bool) -> Queries:
        """[T, H] → queries; see ``Layer.cache``."""
        qkv = ops.linear(x, self.qkv, bias=self.qkv_bias)
        return ops.rope_cache(
            qkv,
            batch,
            self.spec,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            may_sample=may_sample,
        )

    def attend(self, ops: Ops, queries: Queries, batch: FlatBatch, *, sampled: bool) -> Tensor:
        """→ [T or S, H]."""
        heads = ops.attention(queries, batch, self.spec, sampled=sampled)
        return ops.linear(heads, self.output, bias=self.output_bias)


class FeedForward:
    """Gated feed-forward layer (Shazeer 2020): ``down(act(gate x) * up x)``."""

    def __init__(self, weights: WeightLoader, layer: int) -> None:
        config, prefix = weights.config, f"model.layers.{layer}.mlp"
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.gate, self.up = weights.gated(
            f"{prefix}.gate_proj", f"{prefix}.up_proj", inner, hidden
        )
        self.down = weights.linear([f"{prefix}.down_proj"], [hidden], inner)

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        inner = ops.gated_linear(x, self.gate, self.up, activation=self.activation)
        return ops.linear(inner, self.down)


class MixtureOfExperts:
    """Each token goes through its ``num_experts_per_token`` best feed-forward layers."""

    def __init__(self, weights: WeightLoader, layer: int) -> None:
        config, prefix = weights.config, f"model.layers.{layer}.mlp"
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.config = config
        # The router decides; quantising it would save nothing and change the choice.
        self.router = weights.linear(
            [f"{prefix}.gate"], [config.num_experts], hidden, quantizable=False
        )
        experts = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
        pairs = [
            weights.gated(f"{expert}.gate_proj", f"{expert}.up_proj", inner, hidden)
            for expert in experts
        ]
        self.gate, self.up = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.down = [weights.linear([f"{e}.down_proj"], [hidden], inner) for e in experts]

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        return ops.moe(
            x,
            self.router,
            self.gate,
            self.up,
            self.down,
            top_k=self.config.num_experts_per_token,
            norm_topk_prob=self.config.norm_topk_prob,
            activation=self.config.activation,
        )


class Layer(ABC):
    """One decoder layer in two halves: up to its keys and values, and what follows.

    A subclass adds its other weights and the second half.
    """

    def __init__(self, weights: WeightLoader, layer: int) -> None:
        """Load the weights of layer number ``layer``."""
        config = weights.config
        self.eps = config.rms_norm_eps
        name = f"model.layers.{layer}.input_layernorm"
        self.input_norm = weights.vector(name, config.hidden_size)
        self.attention = Attention(weights, layer)

    def cache(
        self, ops: Ops, hidden: Tensor, batch: FlatBatch, *, may_sample: bool = False
    ) -> Queries:
        """[T, H] → queries; keys and values are in the cache, or will be before they are read.

        ``may_sample``: ``finish`` may be for the sampled rows alone.
        """
        x = ops.rms_norm(hidden, self.input_norm, eps=self.eps)
        return self.attention.cache(ops, x, batch, may_sample=may_sample)

    @abstractmethod
    def finish(
        self, ops: Ops, hidden: Tensor, queries: Queries, batch: FlatBatch, *, sampled: bool = False
    ) -> Tensor:
        """[T, H] → [T, H], or [S, H] → [S, H] if ``sampled``; ``hidden`` is dead afterwards."""


class CausalLM:
    """Embedding, layers, final norm, output layer. A subclass says what its layers are.

    Of the last layer's results only the sampled rows are read, so that its second half is computed
    for them alone: a prompt costs a layer less.
    """

    layer_class: ClassVar[type[Layer]]

    def __init__(self, weights: WeightLoader) -> None:
        config = self.config = weights.config
        vocab, hidden, tied = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        self.embed_tokens = weights.embedding("model.embed_tokens", vocab, hidden, tied=tied)
        self.layers = [type(self).layer_class(weights, i) for i in range(config.num_layers)]
        self.norm = weights.vector("model.norm", hidden)
        self.lm_head = self.embed_tokens if tied else None
        if not tied and weights.with_output_layer:
            self.lm_head = weights.output("lm_head", vocab, hidden)

    def forward(self, ops: Ops, batch: FlatBatch) -> Carried:
        """The batch's tokens → hidden states [T, H] before the last layer, and its queries."""
        hidden = ops.embed(self.embed_tokens, batch, scale=self.config.embedding_scale)
        for layer in self.layers[:-1]:
            queries = layer.cache(ops, hidden, batch)
            hidden = layer.finish(ops, hidden, queries, batch)
        return hidden, self.layers[-1].cache(ops, hidden, batch, may_sample=True)

    def final_states(
        self, ops: Ops, carried: Carried, batch: FlatBatch, *, sampled: bool
    ) -> Tensor:
        """What ``forward`` made → [S, H] of the sampled rows, or [T, H], behind the final norm."""
        hidden, queries = carried
        if sampled:
            hidden = ops.gather_rows(hidden, batch)
        hidden = self.layers[-1].finish(ops, hidden, queries, batch, sampled=sampled)
        return ops.rms_norm(hidden, self.norm, eps=self.config.rms_norm_eps)

    def compute_logits(self, ops: Ops, carried: Carried, batch: FlatBatch) -> Tensor:
        """What ``forward`` made → logits [S, V] float32 of the rows ``batch.logits_indices``."""
        rows = self.final_states(ops, carried, batch, sampled=True)
        return ops.logits(rows, self.lm_head, softcap=self.config.final_softcap)


def _attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    return AttentionSpec(
        layer=layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        rope=config.layers[layer].rope,
        sliding_window=config.layers[layer].sliding_window,
        softcap=config.attention_softcap,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else 0.0,
    )
