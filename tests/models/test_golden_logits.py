"""Each architecture against transformers' logits: prefill, chunked prefill, decode, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.golden import POSITIONS, load_golden
from helpers.tiny_models import CASES, tiny_gguf, tiny_hf_dir

from twostep.config.model import ModelConfig
from twostep.models.loader import open_checkpoint
from twostep.models.registry import Model, load_model
from twostep.ops.formats import FORMATS, QUANTIZATIONS
from twostep.ops.reference.backend import ReferenceBatch, ReferenceOps, ReferenceWeights

# Of the largest logit. The measured difference is 2e-6 at most: float32 in another order.
RTOL = 1e-5
BLOCK_SIZE = 4
BLOCKS = [11, 3, 7, 2, 19, 5, 13, 17, 1, 8]
"""Scattered on purpose: a mistake in a block table must show."""


GGUF_CASES = [case for case in CASES if case not in ("qwen2_window", "qwen3_moe_mixed")]
"""GGUF metadata cannot say that only some layers have a window, or that probabilities stay raw."""


def build(path: Path) -> Model:
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, ReferenceWeights())
    checkpoint.close()
    return model


def make_ops(config: ModelConfig) -> ReferenceOps:
    return ReferenceOps(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=40,
        block_size=BLOCK_SIZE,
    )


def step(model: Model, ops: ReferenceOps, *chunks: tuple[list[int], int, list[int]]) -> np.ndarray:
    batch = ReferenceBatch.of(chunks, logits="all")
    logits: np.ndarray = model.compute_logits(ops, model.forward(ops, batch), batch)
    return logits


def in_chunks(model: Model, ids: list[int], sizes: list[int]) -> np.ndarray:
    """Logits of all positions, computed ``sizes`` tokens at a time (the last size repeats)."""
    ops, rows, start = make_ops(model.config), [], 0
    while start < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        rows.append(step(model, ops, (ids[start : start + size], start, BLOCKS)))
        start += size
    return np.concatenate(rows)


def assert_close(logits: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(logits, expected, rtol=0, atol=RTOL * np.abs(expected).max())


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("sizes", [[40], [7], [16], [33, 1], [1]], ids=str)
def test_logits_equal_transformers(case: str, sizes: list[int], tmp_path: Path) -> None:
    ids, expected = load_golden(case)
    model = build(tiny_hf_dir(tmp_path, case))
    assert_close(in_chunks(model, ids, list(sizes))[POSITIONS], expected)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(
    "options", [{"spelling": "v5", "dtype": "F32"}, {"shards": 3, "dtype": "F16"}], ids=str
)
def test_every_directory_is_the_same_model(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ids, expected = load_golden(case)
    model = build(tiny_hf_dir(tmp_path, case, **options))
    assert_close(in_chunks(model, ids, [40])[POSITIONS], expected)


@pytest.mark.parametrize("case", GGUF_CASES)
@pytest.mark.parametrize(("fmt", "parts"), [("F32", 1), ("BF16", 1), ("F16", 3)])
def test_every_gguf_file_is_the_same_model(case: str, fmt: str, parts: int, tmp_path: Path) -> None:
    ids, expected = load_golden(case)
    model = build(tiny_gguf(tmp_path, case, fmt, parts=parts))
    assert_close(in_chunks(model, ids, [40])[POSITIONS], expected)


@pytest.mark.parametrize("fmt", [name for name in FORMATS if FORMATS[name].is_quantized])
@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_moe"])
def test_quantised_formats_run(case: str, fmt: str, tmp_path: Path) -> None:
    """Q8_0 and Q4_* hold the golden model's weights, coarsely; the others random blocks."""
    ids, expected = load_golden(case)
    logits = in_chunks(build(tiny_gguf(tmp_path, case, fmt)), ids[:24], [24])
    spread = expected.std()
    assert 0.5 * spread < logits.std() < 2 * spread
    error = np.abs(logits[:2] - expected[:2]).mean()
    if fmt in QUANTIZATIONS.values():
        assert error < (0.05 if fmt == "Q8_0" else 0.8) * spread
    else:
        assert error > 0.8 * spread


@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3", "qwen3_moe"])
def test_strangers_in_the_batch_change_nothing(case: str, tmp_path: Path) -> None:
    """Three requests at different positions, in blocks of their own, beside one another."""
    ids, expected = load_golden(case)
    model = build(tiny_hf_dir(tmp_path, case))
    ops = make_ops(model.config)
    others = [[20, 21, 22, 23, 24, 25], [26]]
    step(model, ops, (ids[::-1], 0, BLOCKS[:0] + list(range(20, 30))), (others[0], 0, [30, 31]))
    step(model, ops, (ids[:30], 0, BLOCKS))
    logits = step(model, ops, (others[1], 6, [30, 31]), (ids[30:], 30, BLOCKS), ([9], 0, [32]))
    assert_close(logits[1:11][[1, 9]], expected[-2:])


def test_wrong_block_table_shows(tmp_path: Path) -> None:
    """The cache starts as NaN, so the tests above would see a block that was not written."""
    ids, _ = load_golden("llama")
    model = build(tiny_hf_dir(tmp_path, "llama"))
    ops = make_ops(model.config)
    step(model, ops, (ids[:8], 0, BLOCKS))
    logits = step(model, ops, (ids[8:9], 8, [11, 4, 7]))
    assert np.isnan(logits).all()


@pytest.mark.parametrize("case", ["qwen2_window", "mistral"])
def test_blocks_behind_the_window_are_not_read(case: str, tmp_path: Path) -> None:
    ids, _ = load_golden(case)
    model = build(tiny_hf_dir(tmp_path, case))
    ops = make_ops(model.config)
    expected = in_chunks(model, ids, [30, 10])[30:]
    step(model, ops, (ids[:30], 0, BLOCKS))
    ops.k_cache[-1, BLOCKS[:5]] = np.nan
    ops.v_cache[-1, BLOCKS[:5]] = np.nan
    if case == "mistral":
        ops.k_cache[:, BLOCKS[:5]] = np.nan
    np.testing.assert_array_equal(step(model, ops, (ids[30:], 30, BLOCKS)), expected)
