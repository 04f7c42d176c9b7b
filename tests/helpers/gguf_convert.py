"""How a converter turns a tiny Hugging Face checkpoint into GGUF metadata and tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from helpers.tiny_text import gguf_tokenizer

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """All keys of the file."""
    arch = _ARCHITECTURES[config["model_type"]]
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
    }
    if config["model_type"] in ("mistral", "gemma3_text"):
        values["attention.sliding_window"] = config["sliding_window"]
    if config.get("final_logit_softcapping"):
        values["final_logit_softcapping"] = config["final_logit_softcapping"]
    if "num_experts" in config:
        values["expert_count"] = config["num_experts"]
        values["expert_used_count"] = config["num_experts_per_tok"]
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    values |= _rope_metadata(config["rope"])
    top = {"general.architecture": arch, "general.name": "tiny", "general.file_type": 0}
    keys = {f"{arch}.{key}": value for key, value in values.items()}
    return top | keys | gguf_tokenizer(config["vocab_size"])


def gguf_tensors(config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{GGUF name: float32 array, outermost dimension first}."""
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, values in weights.items():
        stem, kind = name.rsplit(".", 1)
        values = _converted(config, stem, values)
        if ".experts." in stem:
            layer, part = stem.split(".")[2], stem.rsplit(".", 1)[1].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(values)
        else:
            tensors[f"{_gguf_stem(config, stem)}.{kind}"] = values
    tensors |= {name: np.stack(parts) for name, parts in experts.items()}
    if config["rope"].get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_divisors(config)
    return tensors


def _rope_metadata(rope: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"rope.freq_base": rope["rope_theta"]}
    # Llama 3's scaling travels as a tensor of divisors.
    if rope.get("rope_type", "llama3") != "llama3":
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = rope["factor"]
    if "original_max_position_embeddings" in rope:
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
    return values


def _gguf_stem(config: dict[str, Any], stem: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return top[stem]
    _, _, layer, part = stem.split(".", 3)
    if part == "post_attention_layernorm":
        is_gemma = config["model_type"] == "gemma3_text"
        return f"blk.{layer}.{'post_attention_norm' if is_gemma else 'ffn_norm'}"
    return f"blk.{layer}.{_PARTS[part]}"


def _converted(config: dict[str, Any], stem: str, values: np.ndarray) -> np.ndarray:
    if config["model_type"] == "gemma3_text" and stem.endswith("norm"):
        return values + np.float32(1)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    field = heads.get(stem.rsplit(".", 1)[-1])
    if field is None or config["model_type"] not in ("llama", "mistral"):
        return values
    # Halves become neighbours: row i of the first half, row i of the second, i + 1, …
    count = config[field]
    halves = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _llama3_divisors(config: dict[str, Any]) -> np.ndarray:
    rope, dim = config["rope"], config["head_dim"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    divisors = []
    for i in range(dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)
