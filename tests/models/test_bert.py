"""BERT's files: its configuration, its names, and what sentence-transformers adds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.golden import embedding_texts, load_embeddings
from helpers.tiny_bert import bert_weights, tiny_bert_dir

from twostep.contracts.errors import ModelFileError, UnsupportedModelError
from twostep.models.loader import open_checkpoint
from twostep.models.loader.pooling_config import StoredPooling, stored_pooling
from twostep.models.registry import load_model
from twostep.ops.reference.backend import ReferenceBatch, ReferenceOps, ReferenceWeights


def reference_hidden(path: Path, ids: list[int], blocks: list[int]) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, ReferenceWeights())
    checkpoint.close()
    config = model.config
    ops = ReferenceOps(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=40,
    )
    batch = ReferenceBatch.of([(ids, 0, blocks)])
    carried = model.forward(ops, batch)
    hidden: np.ndarray = model.final_states(ops, carried, batch, sampled=False)
    last = model.final_states(ops, carried, batch, sampled=True)
    np.testing.assert_array_equal(last, hidden[-1:])
    with pytest.raises(UnsupportedModelError, match="no logits"):
        model.compute_logits(ops, carried, batch)
    return hidden


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_the_reference_backend_equals_transformers(prefix: str, tmp_path: Path) -> None:
    path = tiny_bert_dir(tmp_path, prefix=prefix)
    blocks = list(range(39, 0, -1))
    for number, ids in enumerate(embedding_texts("bert")):
        hidden = reference_hidden(path, ids, blocks)
        np.testing.assert_allclose(hidden[0], load_embeddings("bert", "cls")[number], atol=3e-5)
        mean = hidden.mean(axis=0, dtype=np.float64)
        np.testing.assert_allclose(mean, load_embeddings("bert", "mean")[number], atol=3e-5)


def test_configuration(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_bert_dir(tmp_path))
    config = checkpoint.config
    assert (config.architecture, config.is_encoder, config.num_layers) == ("bert", True, 3)
    assert (config.head_dim, config.num_kv_heads, config.max_position) == (16, 4, 320)
    assert {layer.rope for layer in config.layers} == {None}
    unused = {name for name in bert_weights() if name.startswith("pooler.")}
    assert checkpoint.names == frozenset(bert_weights()) - unused
    checkpoint.close()


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("hidden_act", "relu", UnsupportedModelError, "hidden_act: 'relu'"),
        ("position_embedding_type", "relative_key", UnsupportedModelError, "relative_key"),
        ("is_decoder", True, UnsupportedModelError, "is_decoder"),
        ("num_attention_heads", 5, ModelFileError, "no multiple of 5"),
        ("num_hidden_layers", 0, ModelFileError, "num_hidden_layers"),
        ("max_position_embeddings", 319, ModelFileError, "position_embeddings.weight: shape"),
        ("type_vocab_size", 3, ModelFileError, "token_type_embeddings.weight: shape"),
        ("layer_norm_eps", -1, ModelFileError, "layer_norm_eps"),
    ],
)
def test_configurations_that_are_refused(
    field: str, value: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    path = tiny_bert_dir(tmp_path, **{field: value})
    with pytest.raises(error, match=words):
        load_model(open_checkpoint(path), ReferenceWeights())


# -- sentence-transformers' files -----------------------------------------------------------------


def stored(path: Path) -> StoredPooling:
    checkpoint = open_checkpoint(path)
    try:
        return stored_pooling(checkpoint)
    finally:
        checkpoint.close()


@pytest.mark.parametrize(
    ("pooling", "kind"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")]
)
def test_pooling_of_modules(pooling: str, kind: str, tmp_path: Path) -> None:
    found = stored(tiny_bert_dir(tmp_path, pooling=pooling, normalize=pooling == "cls"))
    assert (found.kind, found.normalize, found.max_length) == (kind, pooling == "cls", 300)


def test_without_modules_nothing_is_said(tmp_path: Path) -> None:
    assert stored(tiny_bert_dir(tmp_path, pooling=None)) == StoredPooling()


def test_the_newer_spelling(tmp_path: Path) -> None:
    files = {"1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode": "cls"}}
    assert stored(tiny_bert_dir(tmp_path, files=files)).kind == "cls"


def test_matryoshka(tmp_path: Path) -> None:
    found = stored(tiny_bert_dir(tmp_path, matryoshka_dimensions=[32, 16]))
    assert (found.is_matryoshka, found.dimensions) == (True, (16, 32))
    assert stored(tiny_bert_dir(tmp_path, is_matryoshka=True)).is_matryoshka


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({"modules.json": {"a": 1}}, ModelFileError, "not a JSON list"),
        ({"modules.json": [{"path": ""}]}, ModelFileError, "without a type"),
        ({"modules.json": [{"type": "x.Dense", "path": "2"}]}, UnsupportedModelError, "Dense"),
        (
            {"modules.json": [{"type": "x.Pooling", "path": "../../etc"}]},
            ModelFileError,
            "no?t a plain folder",
        ),
        ({"modules.json": [{"type": "x.Pooling", "path": "none"}]}, ModelFileError, "missing"),
        (
            {"1_Pooling/config.json": {"pooling_mode_max_tokens": True}},
            UnsupportedModelError,
            "pooling_mode_max_tokens",
        ),
        (
            {
                "1_Pooling/config.json": {
                    "pooling_mode_cls_token": True,
                    "pooling_mode_mean_tokens": True,
                }
            },
            UnsupportedModelError,
            "pooling_mode_cls_token and pooling_mode_mean_tokens",
        ),
        ({"sentence_bert_config.json": {"max_seq_length": -3}}, ModelFileError, "max_seq_length"),
    ],
)
def test_files_that_are_refused(
    files: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        stored(tiny_bert_dir(tmp_path, files=files))


@pytest.mark.parametrize(
    ("number", "kind"), [(None, None), (0, None), (1, "mean"), (2, "cls"), (3, "last")]
)
def test_pooling_of_a_gguf_file(number: int | None, kind: str | None) -> None:
    """Embedding models that are decoders say it in one key."""
    assert stored_pooling(gguf_saying(number)).kind == kind


def test_a_ranking_gguf_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="qwen3.pooling_type: 4"):
        stored_pooling(gguf_saying(4))


def gguf_saying(number: int | None) -> Any:
    metadata: dict[str, Any] = {"general.architecture": "qwen3"}
    if number is not None:
        metadata["qwen3.pooling_type"] = number
    return SimpleNamespace(path=Path("model.gguf"), metadata=metadata)
