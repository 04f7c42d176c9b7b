"""What a loaded model file offers, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from twostep.config.model import ModelConfig
from twostep.ops.protocol import RawTensor


class TokenizerSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tokenizer of a checkpoint comes from: exactly one of the two is set."""

    directory: Path | None = None
    """A Hugging Face directory (``tokenizer.json``, ``tokenizer_config.json``, …)."""
    gguf_metadata: Mapping[str, Any] | None = None
    """The ``tokenizer.*`` keys of a GGUF file, among its others."""


class Checkpoint(Protocol):
    """The weights and facts of one model.

    Tensors go by the names that Hugging Face gives them, whatever the file calls them:
    ``model.layers.0.self_attn.q_proj.weight``, ``lm_head.weight``,
    ``model.layers.0.mlp.experts.3.up_proj.weight``. Norm weights are what multiplies (Gemma's
    1 + w is folded in).
    """

    @property
    def path(self) -> Path:
        """The file or directory, for messages."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model in plain numbers."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of the language model."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as the file holds them."""
        ...

    @property
    def tokenizer(self) -> TokenizerSource:
        """Where the tokenizer comes from."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF: the file's metadata. Hugging Face: ``config.json``."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """``generation_config.json`` (eos_token_id, temperature, …); empty if there is none."""
        ...

    def tensor(self, name: str) -> RawTensor:
        """A view of the mapped file, valid until ``close``.

        Raises:
            ModelFileError: No tensor has this name.
            UnsupportedModelError: Its format cannot be read.
        """
        ...

    def release(self, name: str) -> None:
        """Let a tensor's pages go once it was packed, so that it is not in memory twice.

        Views stay valid: the bytes come back from the file if they are read again.
        """
        ...

    def close(self) -> None:
        """Give the files back; tensors must not be used afterwards. Safe to call twice."""
        ...
