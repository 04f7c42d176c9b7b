"""twostep: an LLM inference engine with two steps in flight.

    from twostep import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
        print(answer.outputs[0].text)

Names are loaded on first use, so that ``import twostep`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostep.contracts.errors import (
        EngineDeadError,
        InvalidRequestError,
        ModelError,
        ModelFileError,
        ModelNotFoundError,
        OutOfMemoryError,
        TwostepError,
        UnsupportedModelError,
        UsageError,
    )
    from twostep.contracts.pooling import PoolingParams
    from twostep.contracts.results import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
    )
    from twostep.contracts.sampling import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from twostep.entrypoints.async_engine import start_async_llm
    from twostep.entrypoints.engine_options import EngineOptions
    from twostep.entrypoints.llm import LLM
    from twostep.frontend.async_llm import AsyncLLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "EngineOptions",
    "InvalidRequestError",
    "Logprob",
    "ModelError",
    "ModelFileError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TwostepError",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "start_async_llm",
]


def _home(name: str) -> str:
    """The module that defines a public name."""
    if name == "LLM":
        return "twostep.entrypoints.llm"
    if name == "AsyncLLM":
        return "twostep.frontend.async_llm"
    if name == "start_async_llm":
        return "twostep.entrypoints.async_engine"
    if name == "EngineOptions":
        return "twostep.entrypoints.engine_options"
    if name == "Logprob" or name.endswith("Output"):
        return "twostep.contracts.results"
    if name == "PoolingParams":
        return "twostep.contracts.pooling"
    if name == "RequestOutputKind" or name.endswith("Params"):
        return "twostep.contracts.sampling"
    return "twostep.contracts.errors"


if not TYPE_CHECKING:  # a checker that saw it would take every misspelt name for Any

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'twostep' has no attribute {name!r}")
        return getattr(importlib.import_module(_home(name)), name)


def __dir__() -> list[str]:
    return sorted(__all__)
