"""BERT and its family: MiniLM, BGE, E5, GTE (Devlin et al. 2019)."""

from __future__ import annotations

from twostep.contracts.errors import UnsupportedModelError
from twostep.models.loader.weights import WeightLoader
from twostep.ops.protocol import AttentionSpec, Carried, FlatBatch, Ops, Tensor, Weight


class Norm:
    """LayerNorm with its weight and bias."""

    def __init__(self, weights: WeightLoader, name: str) -> None:
        hidden = weights.config.hidden_size
        self.eps = weights.config.layer_norm_eps
        self.weight = weights.vector(name, hidden)
        self.bias = weights.biases([name], [hidden])

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


class Dense:
    """``x @ weight.T + bias``; several matrices stacked row-wise are one."""

    def __init__(self, weights: WeightLoader, names: list[str], rows: list[int], width: int):
        self.weight: Weight = weights.linear(names, rows, width)
        self.bias: Weight = weights.biases(names, rows)

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """[T, width] → [T, sum of rows]."""
        return ops.linear(x, self.weight, bias=self.bias)


class BertLayer:
    """Attention of every token to every token, residual, norm; feed-forward, residual, norm."""

    def __init__(self, weights: WeightLoader, layer: int) -> None:
        config, prefix = weights.config, f"encoder.layer.{layer}"
        hidden, inner = config.hidden_size, config.intermediate_size
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.scale,
            rope=None,
            causal=False,
        )
        names = [f"{prefix}.attention.self.{part}" for part in ("query", "key", "value")]
        self.qkv = Dense(weights, names, [hidden] * 3, hidden)
        self.output = Dense(weights, [f"{prefix}.attention.output.dense"], [hidden], hidden)
        self.attention_norm = Norm(weights, f"{prefix}.attention.output.LayerNorm")
        self.up = Dense(weights, [f"{prefix}.intermediate.dense"], [inner], hidden)
        self.down = Dense(weights, [f"{prefix}.output.dense"], [hidden], inner)
        self.norm = Norm(weights, f"{prefix}.output.LayerNorm")

    def __call__(self, ops: Ops, hidden: Tensor, batch: FlatBatch) -> Tensor:
        """[T, H] → [T, H]."""
        queries = ops.rope_cache(self.qkv(ops, hidden), batch, self.spec)
        heads = ops.attention(queries, batch, self.spec)
        hidden = self.attention_norm(ops, ops.add(hidden, self.output(ops, heads)))
        inner = ops.gelu(self.up(ops, hidden))
        return self.norm(ops, ops.add(hidden, self.down(ops, inner)))


class BertModel:
    """Token, position and segment embeddings, normed; layers. There is no final norm."""

    def __init__(self, weights: WeightLoader) -> None:
        config = self.config = weights.config
        name = "embeddings.word_embeddings"
        self.embed_tokens = weights.embedding(
            name, config.vocab_size, config.hidden_size, tied=False
        )
        self.positions = weights.positions(
            "embeddings.position_embeddings",
            "embeddings.token_type_embeddings",
            config.max_position,
            config.num_token_types,
            config.hidden_size,
        )
        self.norm = Norm(weights, "embeddings.LayerNorm")
        self.layers = [BertLayer(weights, layer) for layer in range(config.num_layers)]

    def forward(self, ops: Ops, batch: FlatBatch) -> Carried:
        """The batch's tokens → their hidden states [T, H]."""
        hidden = ops.embed(self.embed_tokens, batch)
        hidden = self.norm(ops, ops.add_positions(hidden, self.positions, batch))
        for layer in self.layers:
            hidden = layer(ops, hidden, batch)
        return (hidden,)

    def final_states(
        self, ops: Ops, carried: Carried, batch: FlatBatch, *, sampled: bool
    ) -> Tensor:
        """Hidden states [T, H], or [S, H] of the sampled rows; they are normed already."""
        [hidden] = carried
        return ops.gather_rows(hidden, batch) if sampled else hidden

    def compute_logits(self, ops: Ops, carried: Carried, batch: FlatBatch) -> Tensor:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError("an encoder (bert) makes embeddings and has no logits")
