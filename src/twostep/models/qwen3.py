"""Qwen 3, dense (Yang et al. 2025)."""

from __future__ import annotations

from twostep.models.decoder import CausalLM
from twostep.models.llama import LlamaLayer


class Qwen3ForCausalLM(CausalLM):
    """Llama's layers with a norm on each head of q and k (``ModelConfig.qk_norm``)."""

    layer_class = LlamaLayer
