"""From an architecture's name to its class, and from a checkpoint to a loaded model."""

from __future__ import annotations

import importlib
from typing import Literal, Protocol, cast

from twostep.config.model import ModelConfig
from twostep.contracts.errors import UnsupportedModelError
from twostep.models.loader.checkpoint import Checkpoint
from twostep.models.loader.memory import available_memory, require_memory
from twostep.models.loader.weights import Progress, WeightLoader, estimate_packed_bytes
from twostep.ops.protocol import Carried, FlatBatch, Ops, Tensor, WeightFactory

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "bert": "BertModel",
}


class Model(Protocol):
    """A loaded model."""

    config: ModelConfig

    def forward(self, ops: Ops, batch: FlatBatch) -> Carried:
        """What is computed for every token of the batch: its keys and values, and all before."""
        ...

    def final_states(
        self, ops: Ops, carried: Carried, batch: FlatBatch, *, sampled: bool
    ) -> Tensor:
        """Hidden states as the output layer, or pooling, reads them: of the rows
        ``batch.logits_indices`` [S, H] if ``sampled``, else of all [T, H]."""
        ...

    def compute_logits(self, ops: Ops, carried: Carried, batch: FlatBatch) -> Tensor:
        """Logits [S, V] float32 of the rows ``batch.logits_indices``.

        Raises:
            UnsupportedModelError: An encoder has no logits.
        """
        ...


class ModelClass(Protocol):
    """What builds a model."""

    def __call__(self, weights: WeightLoader) -> Model:
        """Load all weights."""
        ...


def known_architectures() -> list[str]:
    """Names of all models, sorted."""
    return sorted(_CLASSES)


def model_class(architecture: str) -> ModelClass:
    """The class in ``models/<architecture>.py``, imported now.

    Raises:
        UnsupportedModelError: No such model; lists those there are.
    """
    if architecture not in _CLASSES:
        raise UnsupportedModelError(
            f"architecture '{architecture}' is not supported; "
            f"supported are {', '.join(known_architectures())}"
        )
    module = importlib.import_module(f"twostep.models.{architecture}")
    return cast(ModelClass, getattr(module, _CLASSES[architecture]))


def load_model(
    checkpoint: Checkpoint,
    factory: WeightFactory,
    *,
    precision: Literal["auto", "int8", "bf16"] = "auto",
    quantization: str | None = None,
    progress: Progress | None = None,
    with_output_layer: bool = True,
) -> Model:
    """Build the model of ``checkpoint`` with the weights of a backend.

    Args:
        checkpoint: Stays open until the backend needs its memory maps no more.
        factory: The backend's.
        precision: Of activations in quantised layers (``DeviceConfig.linear_precision``).
        quantization: ``q8_0``, ``q4_0``, ``q4_1`` or None (``--quantization``).
        progress: Called with (tensors done, tensors in all).
        with_output_layer: False: the model makes embeddings only.

    Raises:
        OutOfMemoryError: The packed weights do not fit in what is free.
        ModelFileError: A tensor is missing, misshapen, or has NaN or infinite weights.
        UnsupportedModelError: Architecture or format not built.
        UsageError: Unknown ``quantization``.
    """
    build = model_class(checkpoint.config.architecture)
    needed = estimate_packed_bytes(checkpoint, quantization)
    require_memory(checkpoint.path, needed, available_memory())
    weights = WeightLoader(
        checkpoint,
        factory,
        precision=precision,
        quantization=quantization,
        progress=progress,
        with_output_layer=with_output_layer,
    )
    return build(weights)
