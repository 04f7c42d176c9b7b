"""Mistral 7B (Jiang et al. 2023)."""

from __future__ import annotations

from twostep.models.decoder import CausalLM
from twostep.models.llama import LlamaLayer


class MistralForCausalLM(CausalLM):
    """Llama's layers, each seeing only ``LayerConfig.sliding_window`` tokens back, if set."""

    layer_class = LlamaLayer
