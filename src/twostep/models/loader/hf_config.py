"""``config.json`` of a Hugging Face directory → ModelConfig.

Both spellings are read: ``rope_theta`` with ``rope_scaling`` (transformers 4) and
``rope_parameters`` (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from twostep.config.model import Activation, LayerConfig, ModelConfig, RopeConfig
from twostep.contracts.errors import UnsupportedModelError
from twostep.models.loader.fields import REQUIRED, Fields
from twostep.models.loader.validate import check_num_layers, validate

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3_moe",
    "bert": "bert",
}
"""``model_type`` → file name in ``models``."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# What config.json may leave out because the model's code has it (Gemma 3's does).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
}


def model_config_from_hf(path: Path, values: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed ``config.json``; ``path`` is for messages.

    Raises:
        UnsupportedModelError: The architecture or a feature is not built.
        ModelFileError: A field is missing or wrong.
    """
    top = Fields(path, values)
    architecture = _architecture(top)
    text = top.table("text_config")
    merged = {**_DEFAULTS.get(architecture, {}), **_not_null(text.values if text else values)}
    fields = Fields(path, merged)
    _refuse_unsupported(fields, top)
    if architecture == "bert":
        return _bert(path, fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(1, hidden // heads))
    activation_field = "hidden_activation" if architecture == "gemma3" else "hidden_act"
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        layers=_layers(architecture, fields, head_dim),
        max_position=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, activation_field),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=architecture == "qwen2" or fields.flag("attention_bias", False),
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5
        if architecture == "gemma3"
        else 0.0,
        attention_softcap=fields.optional_number("attn_logit_softcapping") or 0.0,
        final_softcap=fields.optional_number("final_logit_softcapping") or 0.0,
        embedding_scale=math.sqrt(hidden) if architecture == "gemma3" else 1.0,
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3"),
        **_experts(architecture, fields),
    )
    return validate(path, config)


def _bert(path: Path, fields: Fields) -> ModelConfig:
    """An encoder's configuration has names of its own, and no rotary embedding."""
    for name, only in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if (word := fields.text(name, only)) != only:
            raise UnsupportedModelError(
                f"{path}: {name}: '{word}' is not supported for bert; supported is {only}"
            )
    if fields.flag("is_decoder", False):
        raise UnsupportedModelError(
            f"{path}: is_decoder: a BERT that generates is not supported; use another checkpoint"
        )
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    count = fields.integer("num_hidden_layers")
    check_num_layers(path, "num_hidden_layers", count)
    if hidden % heads:
        raise fields.wrong("hidden_size", f"{hidden} is no multiple of {heads} attention heads")
    config = ModelConfig(
        architecture="bert",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        layers=(LayerConfig(rope=None),) * count,
        max_position=fields.integer("max_position_embeddings"),
        is_encoder=True,
        layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
        num_token_types=fields.integer("type_vocab_size", 2),
    )
    return validate(path, config)


def _not_null(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _architecture(fields: Fields) -> str:
    model_type = fields.text("model_type")
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{fields.path}: model_type: '{model_type}' is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[model_type]


def _refuse_unsupported(fields: Fields, top: Fields) -> None:
    """Features that would silently give wrong answers."""
    for name in ("quantization_config", "compression_config"):
        if top.get(name):
            raise UnsupportedModelError(
                f"{fields.path}: {name}: weights quantised this way cannot be read; "
                "use the original checkpoint with --quantization, or a GGUF file"
            )
    for name in ("mlp_bias", "use_bidirectional_attention"):
        if fields.get(name):
            raise UnsupportedModelError(
                f"{fields.path}: {name}: is not supported; use another checkpoint"
            )


def _activation(fields: Fields, name: str) -> Activation:
    word = fields.text(name, "silu")
    if word not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.path}: {name}: '{word}' is not supported; "
            f"supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[word]


def _experts(architecture: str, fields: Fields) -> dict[str, Any]:
    if architecture != "qwen3_moe":
        return {}
    alias = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    return {
        "num_experts": fields.integer(alias),
        "num_experts_per_token": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob", False),
    }


def _layers(architecture: str, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
    count = fields.integer("num_hidden_layers")
    check_num_layers(fields.path, "num_hidden_layers", count)
    sliding = _sliding(architecture, fields, count)
    window = fields.integer("sliding_window") if any(sliding) else None
    ropes = {
        is_sliding: _rope(architecture, fields, head_dim, is_sliding=is_sliding)
        for is_sliding in set(sliding)
    }
    return tuple(
        LayerConfig(
            rope=ropes[sliding[i]],
            sliding_window=window if sliding[i] else None,
            is_moe=architecture == "qwen3_moe" and _is_moe(fields, i),
        )
        for i in range(count)
    )


def _is_moe(fields: Fields, layer: int) -> bool:
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.wrong("mlp_only_layers", f"{dense!r} is not a list")
    if layer in dense:
        return False
    return (layer + 1) % fields.integer("decoder_sparse_step", 1) == 0


def _sliding(architecture: str, fields: Fields, count: int) -> list[bool]:
    """Which layers see only a window."""
    window = fields.get("sliding_window")
    if architecture in ("llama", "qwen3_moe", "qwen2", "qwen3") and not (
        fields.flag("use_sliding_window", False) and window
    ):
        return [False] * count
    types = fields.get("layer_types")
    if types is not None:
        return _from_layer_types(fields, types, count)
    if architecture == "gemma3":
        pattern = fields.integer("sliding_window_pattern", 6)
        return [(i + 1) % pattern != 0 for i in range(count)]
    if architecture in ("qwen2", "qwen3"):
        first = fields.integer("max_window_layers", 28, low=0)
        return [i >= first for i in range(count)]
    return [bool(window)] * count


def _from_layer_types(fields: Fields, types: Any, count: int) -> list[bool]:
    if not isinstance(types, list) or len(types) != count:
        raise fields.wrong("layer_types", f"not a list of {count} layers")
    known = {"sliding_attention": True, "full_attention": False}
    for word in types:
        if not isinstance(word, str) or word not in known:
            raise UnsupportedModelError(
                f"{fields.path}: layer_types: {word!r} is not supported; use another checkpoint"
            )
    return [known[word] for word in types]


def _rope(architecture: str, fields: Fields, head_dim: int, *, is_sliding: bool) -> RopeConfig:
    """The rotary embedding of one kind of layer."""
    local = architecture == "gemma3" and is_sliding
    default_theta: Any = 10000.0
    if architecture == "gemma3":
        default_theta = 10000.0 if local else 1000000.0
    top_theta = "rope_local_base_freq" if local else "rope_theta"
    theta = fields.number(top_theta, default_theta)
    params = fields.table("rope_parameters")
    if params is not None:
        kind = "sliding_attention" if is_sliding else "full_attention"
        params = params.table(kind) or params
    elif not local:
        # Gemma 3's local layers are never stretched.
        params = fields.table("rope_scaling")
    params = params or Fields(fields.path, {})
    return _scaled(fields, params, params.number("rope_theta", theta), head_dim)


def _scaled(fields: Fields, params: Fields, theta: float, head_dim: int) -> RopeConfig:
    kind = params.text("rope_type", params.text("type", "default"))
    partial = params.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModelError(
            f"{fields.path}: rope_type: '{kind}' is not supported; "
            "supported are default, linear, llama3, yarn"
        )
    original = params.integer(
        "original_max_position_embeddings", fields.integer("max_position_embeddings")
    )
    if kind == "yarn" and params.get("truncate") is False:
        raise UnsupportedModelError(
            f"{fields.path}: truncate: false is not supported for yarn; use another checkpoint"
        )
    default_factor = fields.integer("max_position_embeddings") / original
    factor = params.number("factor", default_factor if kind == "yarn" else REQUIRED)
    is_llama3 = kind == "llama3"
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling=cast(Any, kind),
        factor=factor,
        original_max_position=original if kind != "linear" else 0,
        low_freq_factor=params.number("low_freq_factor", REQUIRED if is_llama3 else 1.0),
        high_freq_factor=params.number("high_freq_factor", REQUIRED if is_llama3 else 4.0),
        beta_fast=params.number("beta_fast", 32.0),
        beta_slow=params.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(params, factor) if kind == "yarn" else None,
    )


def _yarn_attention_factor(params: Fields, factor: float) -> float | None:
    """None for YaRN's own formula; DeepSeek's files give it as a ratio of two such formulas."""
    explicit = params.optional_number("attention_factor")
    scale, scale_all = params.get("mscale"), params.get("mscale_all_dim")
    if explicit is not None or not (scale and scale_all):
        return explicit

    def formula(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return formula(params.number("mscale")) / formula(params.number("mscale_all_dim"))
