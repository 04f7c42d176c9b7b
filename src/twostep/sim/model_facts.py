"""What a model costs, counted from its configuration: parameters, bytes, floating-point operations.

Legend: T tokens, S logits rows. A multiplication and an addition are two operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from twostep.config.model import ModelConfig
from twostep.contracts.errors import ModelNotFoundError, UsageError
from twostep.models.loader.hf_config import model_config_from_hf
from twostep.models.loader.json_file import read_json
from twostep.sim.known_models import KNOWN_MODELS, known_name

WEIGHT_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "fp32": 4.0,
        "bf16": 2.0,
        "fp16": 2.0,
        "fp8": 1.0,
        "int8": 1.0,
        "q8_0": 34 / 32,
        "q4_1": 20 / 32,
        "q4_0": 18 / 32,
    }
)
"""Bytes of one weight; the last three with their scales."""
COMPUTE_DTYPE: Mapping[str, str] = MappingProxyType(
    {"q8_0": "int8", "q4_1": "int8", "q4_0": "int8"}
)
"""What quantised weights are multiplied in, where it is not their own type."""
KV_BYTES: Mapping[str, int] = MappingProxyType(
    {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
)

KERNELS_PER_LAYER = 9
"""Norm, qkv, rope and cache, attention, output, norm, gate and up, activation, down."""
KERNELS_PER_MOE_LAYER = 11
"""Router and a sum over experts besides."""
KERNELS_AROUND = 2
"""Embedding and last norm."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model and the number types it is served with."""

    name: str
    config: ModelConfig
    dtype: str = "bf16"
    """Of the weights, a key of :data:`WEIGHT_BYTES`."""
    kv_dtype: str = "bf16"

    @property
    def compute_dtype(self) -> str:
        """What matrix products are computed in."""
        return COMPUTE_DTYPE.get(self.dtype, self.dtype)

    @property
    def attention_params(self) -> int:
        """Of one layer's projections: q, k, v, output, and q's, k's, v's biases."""
        c = self.config
        qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        bias = qkv if c.attention_bias else 0
        return c.hidden_size * qkv + c.num_heads * c.head_dim * c.hidden_size + bias

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(layer.is_moe for layer in self.config.layers)

    @property
    def norm_params(self) -> int:
        """Of all layers and the last norm. Gemma has four norms in a layer, the others two."""
        c = self.config
        per_layer = (4 if c.architecture == "gemma3" else 2) * c.hidden_size
        per_layer += 2 * c.head_dim if c.qk_norm else 0
        return c.num_layers * per_layer + c.hidden_size

    @property
    def embedding_params(self) -> int:
        """The table of token embeddings; with tied embeddings the logits use it too."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters."""
        tables = 1 if self.config.tie_word_embeddings else 2
        return self.layer_params(None) + self.norm_params + tables * self.embedding_params

    def layer_params(self, experts: float | None) -> int:
        """Matrices of all layers, with so many experts of each layer that has any; None: all."""
        c = self.config
        dense = c.num_layers - self.num_moe_layers
        count = c.num_experts if experts is None else experts
        expert = 3 * c.hidden_size * c.moe_intermediate_size
        moe = c.hidden_size * c.num_experts + count * expert
        mlp = 3 * c.hidden_size * c.intermediate_size
        return round(c.num_layers * self.attention_params + dense * mlp + self.num_moe_layers * moe)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; norms stay in two bytes."""
        matrices = self.num_params - self.norm_params
        return round(matrices * WEIGHT_BYTES[self.dtype]) + 2 * self.norm_params

    def streamed_layer_bytes(self, num_tokens: int) -> int:
        """Bytes of layer weights that a step of T tokens reads.

        Of experts those that at least one token chose, if tokens choose evenly.
        """
        c = self.config
        experts = 0.0
        if c.num_experts:
            unused = (1 - c.num_experts_per_token / c.num_experts) ** num_tokens
            experts = c.num_experts * (1 - unused)
        return round(self.layer_params(experts) * WEIGHT_BYTES[self.dtype])

    @property
    def logits_weight_bytes(self) -> int:
        """Bytes of the matrix that makes logits."""
        return round(self.embedding_params * WEIGHT_BYTES[self.dtype])

    @property
    def layer_flops_per_token(self) -> int:
        """Operations of one token in all matrix products of the layers."""
        return 2 * self.layer_params(float(self.config.num_experts_per_token))

    @property
    def logits_flops_per_row(self) -> int:
        """Operations of one logits row."""
        return 2 * self.embedding_params

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        c = self.config
        return c.num_layers * 2 * c.num_kv_heads * c.head_dim * KV_BYTES[self.kv_dtype]

    @property
    def kv_bytes_per_layer(self) -> int:
        """The same for one layer."""
        return self.kv_bytes_per_token // self.config.num_layers

    @property
    def flops_per_pair(self) -> int:
        """Operations of one layer's attention for one query and one key."""
        return 4 * self.config.num_heads * self.config.head_dim

    @property
    def windows(self) -> dict[int | None, int]:
        """{sliding window, None for full attention: number of layers}."""
        found: dict[int | None, int] = {}
        for layer in self.config.layers:
            found[layer.sliding_window] = found.get(layer.sliding_window, 0) + 1
        return found

    @property
    def num_kernels(self) -> int:
        """Kernels of one forward pass, logits and sampling not included."""
        moe = self.num_moe_layers
        dense = self.config.num_layers - moe
        return dense * KERNELS_PER_LAYER + moe * KERNELS_PER_MOE_LAYER + KERNELS_AROUND


def load_model_facts(model: str, *, dtype: str = "bf16", kv_dtype: str = "bf16") -> ModelFacts:
    """Facts of a known name, a ``config.json``, or a directory that holds one.

    Raises:
        UsageError: A number type is unknown.
        ModelError: No such model, or its configuration can't be read.
    """
    for given, known in ((dtype, WEIGHT_BYTES), (kv_dtype, KV_BYTES)):
        if given not in known:
            raise UsageError(f"unknown number type {given!r}: one of {', '.join(known)}")
    name = known_name(model)
    if name is not None:
        config = model_config_from_hf(Path(name), KNOWN_MODELS[name])
        return ModelFacts(name=name, config=config, dtype=dtype, kv_dtype=kv_dtype)
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelNotFoundError(
            f"{model}: not a model known by name ({', '.join(KNOWN_MODELS)}) and no such path; "
            "give a config.json or the directory that holds one"
        )
    file = path / "config.json" if path.is_dir() else path
    config = model_config_from_hf(file, read_json(file))
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return ModelFacts(name=name, config=config, dtype=dtype, kv_dtype=kv_dtype)
