"""Qwen 2 and 2.5 (Yang et al. 2024)."""

from __future__ import annotations

from twostep.models.decoder import CausalLM
from twostep.models.llama import LlamaLayer


class Qwen2ForCausalLM(CausalLM):
    """Llama's layers with biases on q, k and v (``ModelConfig.attention_bias``)."""

    layer_class = LlamaLayer
