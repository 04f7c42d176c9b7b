"""The CPU backend's logits: against transformers' for every architecture, in every cut."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.golden import POSITIONS, load_golden
from helpers.tiny_models import CASES, tiny_gguf, tiny_hf_dir

from twostep import _native as native
from twostep.entrypoints.engine_options import EngineOptions
from twostep.entrypoints.inproc_engine import build_engine
from twostep.models.loader import open_checkpoint
from twostep.models.registry import load_model
from twostep.ops.formats import FORMATS
from twostep.ops.reference.backend import ReferenceBatch, ReferenceOps, ReferenceWeights
from twostep.runner.prompt_logits import prompt_logits

ISAS = native.cpu_info()["isas"]
# Of the largest logit: float32 sums in another order.
EXACT_RTOL = 3e-5
# bf16 weights on AVX-512 meet activations rounded to bf16.
BF16_RTOL = {"scalar": 3e-5, "avx2": 3e-5, "avx512": 2e-2, "amx": 2e-2}


def cpu_logits(
    path: Path, ids: list[int], isa: str, chunk: int, *, precision: str = "auto"
) -> np.ndarray:
    """[T, V] through plans and kernels of one instruction set."""
    before = os.environ.get("TWOSTEP_CPU_ISA")
    os.environ["TWOSTEP_CPU_ISA"] = isa
    try:
        engine = build_engine(
            path,
            EngineOptions(
                linear_precision=precision,  # type: ignore[arg-type]
                kv_cache_dtype="fp32",
                max_num_seqs=1,
                max_num_batched_tokens=64,
                max_model_len=64,
                threads=2,
            ),
        )
    finally:
        if before is None:
            del os.environ["TWOSTEP_CPU_ISA"]
        else:
            os.environ["TWOSTEP_CPU_ISA"] = before
    rows = [part.copy() for part in prompt_logits(engine.model, ids, chunk=chunk)]
    engine.client.close()
    return np.concatenate(rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("chunk", [40, 7, 1])
def test_logits_equal_transformers(case: str, isa: str, chunk: int, tmp_path: Path) -> None:
    ids, expected = load_golden(case)
    logits = cpu_logits(tiny_hf_dir(tmp_path, case), ids, isa, chunk)[POSITIONS]
    np.testing.assert_allclose(
        logits, expected, rtol=0, atol=BF16_RTOL[isa] * np.abs(expected).max()
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_every_format_against_the_reference_backend(
    fmt: str, precision: str, isa: str, tmp_path: Path
) -> None:
    """Quantised activations only add what quantising them costs."""
    path = tiny_gguf(tmp_path, "llama", fmt)
    ids, _ = load_golden("llama")
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, ReferenceWeights())
    config = model.config
    ops = ReferenceOps(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=8,
    )
    batch = ReferenceBatch.of([(ids, 0, [1, 2, 3])], logits="all")
    expected = model.compute_logits(ops, model.forward(ops, batch), batch)
    checkpoint.close()
    logits = cpu_logits(path, ids, isa, 40, precision=precision)
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    if FORMATS[fmt].is_quantized and precision == "int8":
        assert error < 0.06
    else:
        assert error < (BF16_RTOL[isa] if fmt == "BF16" else EXACT_RTOL)
