"""Each architecture against transformers' logits: prefill, chunked prefill, decode, batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.golden import POSITIONS, load_golden
from helpers.tiny_models import CASES, tiny_gguf, tiny_hf_dir

from twostep.config.model import ModelConfig
from twostep.models.loader import open_checkpoint
from twostep.models.registry import Model, load_model
from twostep.ops.reference import ReferenceBatch, ReferenceOps, ReferenceWeights

# Of the largest logit. The measured difference is 2e-6 at most: float32 in another order.
RTOL = 1e-5
BLOCK_SIZE = 4
BLOCKS = [11, 3, 7, 2, 19, 5, 13, 17, 1, 8]
"""Scattered on purpose: a mistake in a block table must show."""


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
    "write",
    [
        lambda tmp, case: tiny_hf_dir(tmp, case, spelling="v5", dtype="F32"),
        lambda tmp, case: tiny_hf_dir(tmp, case, shards=3, dtype="F16"),
        lambda tmp, case: tiny_gguf(tmp, case, "F32"),
        lambda tmp, case: tiny_gguf(tmp, case, "BF16"),
        lambda tmp, case: tiny_gguf(tmp, case, "F16", parts=3),
    ],
    ids=["v5", "shards", "gguf-f32", "gguf-bf16", "gguf-split"],
)
def test_every_kind_of_file_is_the_same_model(
    case: str, write: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    path = write(tmp_path, case)
    if path.suffix == ".gguf" and case in ("qwen2_window", "qwen3_moe_mixed"):
        pytest.skip("GGUF cannot say this")
    ids, expected = load_golden(case)
    assert_close(in_chunks(build(path), ids, [40])[POSITIONS], expected)


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
