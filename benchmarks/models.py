"""The models that are compared, and the files of ``benchmarks.make_models`` they lie in."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a decoder-only transformer is made of."""

    architecture: str
    """As GGUF names it."""
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    max_position: int
    rope_theta: float
    eps: float = 1e-5

    @property
    def num_params(self) -> int:
        """Of all matrices."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.inner) + tables

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values in two bytes each, all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


SHAPES = {
    "smol": Shape(
        architecture="llama", hidden=576, inner=1536, layers=30, heads=9, kv_heads=3, head_dim=64,
        vocab=49_152, tied=True, max_position=8192, rope_theta=100_000.0,
    ),
    "llama-3.2-1b": Shape(
        architecture="llama", hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8,
        head_dim=64, vocab=128_256, tied=True, max_position=131_072, rope_theta=500_000.0,
    ),
    "qwen3-4b": Shape(
        architecture="qwen3", hidden=2560, inner=9728, layers=36, heads=32, kv_heads=8,
        head_dim=128, vocab=151_936, tied=True, max_position=40_960, rope_theta=1_000_000.0,
        eps=1e-6,
    ),
    "llama-3.1-8b": Shape(
        architecture="llama", hidden=4096, inner=14_336, layers=32, heads=32, kv_heads=8,
        head_dim=128, vocab=128_256, tied=False, max_position=131_072, rope_theta=500_000.0,
    ),
    "tiny": Shape(
        architecture="llama", hidden=256, inner=512, layers=2, heads=4, kv_heads=2, head_dim=64,
        vocab=1024, tied=True, max_position=4096, rope_theta=10_000.0,
    ),
}  # fmt: skip
"""``tiny`` is for trying things out; it is not compared."""

FILE_TYPES = {
    "smol": ("Q4_0", "Q4_1", "Q8_0", "BF16"),
    "llama-3.2-1b": ("Q4_0", "Q8_0", "BF16"),
    "qwen3-4b": ("Q4_0", "Q8_0", "BF16"),
    "llama-3.1-8b": ("Q4_0", "Q4_K"),
}
"""Of each shape's GGUF files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One row of the comparison."""

    name: str
    shape: Shape
    gguf: Path | None
    hf: Path | None
    """The same weights in Hugging Face layout, bf16; engines that read no GGUF use it."""
    quantization: str | None = None
    """What twostep quantises the Hugging Face folder to, at load."""
    is_trained: bool = False
    """Random weights otherwise."""

    @property
    def num_params(self) -> int:
        """Of all matrices."""
        return self.shape.num_params

    @property
    def max_position(self) -> int:
        """Longest sequence."""
        return self.shape.max_position

    @property
    def file_bytes(self) -> int:
        """Bytes of the largest file that an engine loads."""
        files = [] if self.gguf is None else [self.gguf]
        files += [] if self.hf is None else list(self.hf.glob("*.safetensors"))
        return max((file.stat().st_size for file in files if file.exists()), default=0)


def gguf_path(folder: Path, shape: str, file_type: str) -> Path:
    """Where ``make_models`` puts a GGUF file."""
    return folder / f"{shape}-{file_type}.gguf"


def hf_path(folder: Path, shape: str) -> Path:
    """Where ``make_models`` puts a Hugging Face folder."""
    return folder / f"{shape}-bf16-hf"


def all_models(folder: Path) -> dict[str, Model]:
    """Every model by name, whether its files exist or not."""
    models = {}
    for shape, file_types in FILE_TYPES.items():
        for file_type in file_types:
            models[f"{shape}-{file_type}"] = Model(
                name=f"{shape}-{file_type}",
                shape=SHAPES[shape],
                gguf=gguf_path(folder, shape, file_type),
                hf=hf_path(folder, shape) if file_type == "BF16" else None,
                is_trained=shape == "smol",
            )
        if "BF16" in file_types:
            # The checkpoint that vLLM reads, quantised at load here and left as it is there.
            models[f"{shape}-hf-q8_0"] = Model(
                name=f"{shape}-hf-q8_0",
                shape=SHAPES[shape],
                gguf=None,
                hf=hf_path(folder, shape),
                quantization="q8_0",
                is_trained=shape == "smol",
            )
    return models


def is_present(model: Model) -> bool:
    """Whether at least one engine beside ours finds its files."""
    if model.gguf is not None:
        return model.gguf.exists()
    return model.hf is not None and (model.hf / "config.json").exists()
