"""GGUF tensor names → the names that models ask for (Hugging Face's)."""

from __future__ import annotations

import re

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}

# Gemma has a norm on both sides of attention and of the feed-forward part.
_GEMMA3_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}

_BLOCK = re.compile(r"blk\.(\d{1,5})\.([a-z_]+)\.(weight|bias)")


def hf_name(name: str, architecture: str) -> str | None:
    """The logical name of a GGUF tensor; None for one that no model of ours uses."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    table = _GEMMA3_LAYER if architecture == "gemma3" else _LAYER
    if part not in table:
        return None
    return f"model.layers.{int(layer)}.{table[part]}.{kind}"


def expert_name(name: str) -> tuple[str, str] | None:
    """For a stack of experts [E, N, K]: what comes before and after the expert's number."""
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _EXPERTS or match[3] != "weight":
        return None
    return f"model.layers.{int(match[1])}.mlp.experts.", f".{_EXPERTS[match[2]]}.weight"
