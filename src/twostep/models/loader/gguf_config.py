"""Metadata of a GGUF file → ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostep.config.model import LayerConfig, ModelConfig, RopeConfig
from twostep.contracts.errors import UnsupportedModelError
from twostep.models.loader.fields import REQUIRED, Fields
from twostep.models.loader.gguf import GGUFTensor
from twostep.models.loader.validate import check_num_layers, validate

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "qwen3moe": "qwen3_moe",
}
"""``general.architecture`` → file name in ``models``."""

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor that divides the rotary frequencies (Llama 3's scaling, worked out)."""

GEMMA3_SLIDING_PATTERN = 6
"""Every sixth layer of Gemma 3 sees everything; the files do not say so."""

GEMMA3_27B_LAYERS = 62


def model_config_from_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GGUFTensor],
    rope_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """Read the metadata; ``tensors`` tells what the file does not say in words.

    Args:
        path: For messages.
        metadata: Keys and values of the file.
        tensors: The tensor directory.
        rope_factors: Values of ``rope_freqs.weight``, if the file has it.

    Raises:
        UnsupportedModelError: The architecture or a feature is not built.
        ModelFileError: A key or tensor is missing or wrong.
    """
    architecture, fields = _architecture(path, metadata)
    hidden, heads = fields.integer("embedding_length"), _heads(fields, "attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{path}: {fields.prefix}attention.value_length: values and keys of different length "
            "are not supported; use another model"
        )
    is_gemma = architecture == "gemma3"
    rope = _rope(architecture, fields, head_dim, rope_factors)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(path, tensors),
        hidden_size=hidden,
        intermediate_size=_feed_forward(architecture, fields),
        num_heads=heads,
        num_kv_heads=_heads(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        layers=_layers(architecture, fields, tensors, rope),
        max_position=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if is_gemma else "silu",
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_scale=_attention_scale(architecture, fields, hidden, heads),
        attention_softcap=fields.optional_number("attn_logit_softcapping") or 0.0,
        final_softcap=fields.optional_number("final_logit_softcapping") or 0.0,
        embedding_scale=math.sqrt(hidden) if is_gemma else 1.0,
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3"),
        **_experts(architecture, fields),
    )
    return validate(path, config)


def _architecture(path: Path, metadata: Mapping[str, Any]) -> tuple[str, Fields]:
    word = Fields(path, metadata).text("general.architecture")
    if word not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: general.architecture: '{word}' is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[word], Fields(path, metadata, f"{word}.")


def _vocab_size(path: Path, tensors: Mapping[str, GGUFTensor]) -> int:
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise Fields(path, {}).wrong("token_embd.weight", "no table of embeddings")
    return table.shape[0]


def _heads(fields: Fields, name: str, default: Any = REQUIRED) -> int:
    """A number, or a list with one number for each layer if all are equal."""
    value = fields.get(name)
    if not isinstance(value, list):
        return fields.integer(name, default)
    if len(set(map(repr, value))) != 1:
        raise UnsupportedModelError(
            f"{fields.path}: {fields.prefix}{name}: layers of different shape are not supported; "
            "use another model"
        )
    return Fields(fields.path, {fields.prefix + name: value[0]}, fields.prefix).integer(name)


def _feed_forward(architecture: str, fields: Fields) -> int:
    # Files of pure mixtures of experts may give no size of a dense layer.
    default = fields.get("expert_feed_forward_length") if architecture == "qwen3_moe" else REQUIRED
    return fields.integer("feed_forward_length", REQUIRED if default is None else default)


def _attention_scale(architecture: str, fields: Fields, hidden: int, heads: int) -> float:
    """0 for the usual 1 / sqrt(head_dim); Gemma 3 27B takes 1 / sqrt(hidden / heads)."""
    if architecture == "gemma3" and fields.integer("block_count") == GEMMA3_27B_LAYERS:
        return float((hidden / heads) ** -0.5)
    return 0.0


def _experts(architecture: str, fields: Fields) -> dict[str, Any]:
    if architecture != "qwen3_moe":
        return {}
    return {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_token": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _layers(
    architecture: str, fields: Fields, tensors: Mapping[str, GGUFTensor], full: RopeConfig
) -> tuple[LayerConfig, ...]:
    """``full`` is the rope of layers that see everything."""
    count = fields.integer("block_count")
    check_num_layers(fields.path, f"{fields.prefix}block_count", count)
    moe = [f"blk.{i}.ffn_gate_exps.weight" in tensors for i in range(count)]
    if not fields.get("attention.sliding_window"):
        return tuple(LayerConfig(rope=full, is_moe=is_moe) for is_moe in moe)
    window = fields.integer("attention.sliding_window")
    if architecture != "gemma3":
        return tuple(LayerConfig(rope=full, sliding_window=window, is_moe=is_moe) for is_moe in moe)
    theta = fields.number("rope.freq_base_swa", 10000.0)
    local = RopeConfig(theta=theta, rotary_dim=full.rotary_dim)
    return tuple(
        LayerConfig(rope=local, sliding_window=window)
        if (i + 1) % GEMMA3_SLIDING_PATTERN
        else LayerConfig(rope=full)
        for i in range(count)
    )


def _rope(
    architecture: str, fields: Fields, head_dim: int, rope_factors: tuple[float, ...]
) -> RopeConfig:
    """Rotary embedding of the layers that see everything."""
    scaling = fields.text("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{fields.path}: {fields.prefix}rope.scaling.type: '{scaling}' is not supported; "
            "supported are none, linear, yarn"
        )
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    factor = fields.number("rope.scaling.factor", 1.0)
    if rope_factors and (
        len(rope_factors) != rotary_dim // 2
        or not all(math.isfinite(value) and value > 0 for value in rope_factors)
    ):
        raise fields.wrong(ROPE_FACTORS, f"not {rotary_dim // 2} numbers above 0")
    return RopeConfig(
        theta=fields.number("rope.freq_base", 10000.0),
        rotary_dim=rotary_dim,
        # Checked against the literals above; the checker sees a str.
        scaling="none" if factor == 1.0 else scaling,  # type: ignore[arg-type]
        factor=factor,
        original_max_position=fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(fields, factor) if scaling == "yarn" else None,
        freq_factors=rope_factors,
        # Converters permute q and k of these families for pairs of neighbours.
        interleaved=architecture in ("llama", "mistral"),
    )


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """The file's factor multiplies YaRN's own formula."""
    extra = fields.number("rope.scaling.attn_factor", 1.0)
    return extra * (0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0)
