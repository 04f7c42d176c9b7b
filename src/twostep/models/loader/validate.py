"""Whether the numbers of a model fit together."""

from __future__ import annotations

from pathlib import Path

from twostep.config.model import ModelConfig, RopeConfig
from twostep.contracts.errors import ModelFileError

MAX_LAYERS = 4096
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 4096


def check_num_layers(path: Path, field: str, num_layers: int) -> None:
    """Before a table of so many layers is built."""
    if num_layers > MAX_LAYERS:
        raise ModelFileError(
            f"{path}: {field}: {num_layers} layers are more than {MAX_LAYERS}; "
            "the file is corrupt, download it again"
        )


def validate(path: Path, config: ModelConfig) -> ModelConfig:
    """``config`` itself, if its numbers agree with one another.

    Raises:
        ModelFileError: They don't; names the fields.
    """
    for is_wrong, problem in _problems(config):
        if is_wrong:
            raise ModelFileError(
                f"{path}: {problem}; the configuration is corrupt, download the model again"
            )
    for layer in config.layers:
        if layer.rope is not None:
            _validate_rope(path, layer.rope, config.head_dim)
    return config


def _problems(config: ModelConfig) -> list[tuple[bool, str]]:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    experts, chosen = config.num_experts, config.num_experts_per_token
    has_moe = any(layer.is_moe for layer in config.layers)
    return [
        (heads % kv_heads != 0, f"{heads} attention heads do not share {kv_heads} KV heads evenly"),
        (config.head_dim > MAX_HEAD_DIM, f"head_dim {config.head_dim} exceeds {MAX_HEAD_DIM}"),
        (config.head_dim % 2 != 0, f"head_dim {config.head_dim} is odd"),
        (experts > MAX_EXPERTS, f"{experts} experts are more than {MAX_EXPERTS}"),
        (has_moe and not 1 <= chosen <= experts, f"{chosen} experts per token out of {experts}"),
        (has_moe and config.moe_intermediate_size < 1, "moe_intermediate_size is missing"),
    ]


def _validate_rope(path: Path, rope: RopeConfig, head_dim: int) -> None:
    if rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= head_dim:
        raise ModelFileError(
            f"{path}: rope: {rope.rotary_dim} rotary dimensions of a head of {head_dim}; "
            "the configuration is corrupt, download the model again"
        )
    if rope.theta <= 1:
        raise ModelFileError(
            f"{path}: rope: theta {rope.theta} is not above 1; "
            "the configuration is corrupt, download the model again"
        )
    if rope.scaling in ("llama3", "yarn") and rope.original_max_position < 1:
        raise ModelFileError(
            f"{path}: original_max_position_embeddings: is missing for {rope.scaling} scaling; "
            "the configuration is corrupt, download the model again"
        )
    if rope.scaling == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelFileError(
            f"{path}: high_freq_factor: {rope.high_freq_factor} is not above low_freq_factor "
            f"{rope.low_freq_factor}; the configuration is corrupt, download the model again"
        )
