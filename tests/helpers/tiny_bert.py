"""A tiny random-weight BERT as sentence-transformers would save it: an encoder with its pooling.

    tiny_bert_dir(tmp_path)                                mean of all tokens, length 1
    tiny_bert_dir(tmp_path, pooling="cls", normalize=False)

As with ``tiny_models``, the weights are a pure function of a tensor's name.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from helpers.tiny_models import write_safetensors

from twostep.ops.formats import requantize
from twostep.ops.protocol import RawTensor

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
WORDS = ["the", "cat", "sat", "on", "mat", "dog", "ran", "is", "red", "sun", "and", ",", "."]
VOCABULARY = [*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
CLS, SEP = SPECIALS.index("[CLS]"), SPECIALS.index("[SEP]")

MAX_LENGTH = 320
"""Positions; more than one segment of attention."""
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "pad_token_id": 0,
}


def bert_ids(length: int, seed: int = 0) -> list[int]:
    """Token ids of a text of so many tokens, frame included."""
    draws = np.random.PCG64(1000 * length + seed).random_raw(length - 2)
    count = np.uint64(len(VOCABULARY) - len(SPECIALS))
    return [CLS, *(len(SPECIALS) + int(draw % count) for draw in draws), SEP]


def bert_weights() -> dict[str, np.ndarray]:
    """All tensors by Hugging Face name, float32."""
    return {name: _values(name, shape) for name, shape in _shapes().items()}


def tiny_bert_dir(
    tmp_path: Path,
    *,
    pooling: str | None = "mean",
    normalize: bool = True,
    dtype: str = "F32",
    prefix: str = "",
    files: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write it and return its directory.

    Args:
        tmp_path: Where; the directory is ``bert-hf`` below it.
        pooling: ``mean``, ``cls`` or ``lasttoken``; None: no files of sentence-transformers.
        normalize: Whether a normalisation follows.
        dtype: Of the weights: F32, F16 or BF16.
        prefix: Before every tensor's name.
        files: JSON files to write besides, or over, those.
        config: Fields of config.json to replace.
    """
    directory = tmp_path / "bert-hf"
    directory.mkdir(parents=True, exist_ok=True)
    documents: dict[str, Any] = {
        "config.json": {**CONFIG, **config},
        "tokenizer.json": tokenizer_document(),
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "model_max_length": 512},
    }
    if pooling is not None:
        names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        documents["modules.json"] = [
            {
                "idx": i,
                "name": str(i),
                "path": "" if i == 0 else f"{i}_{name}",
                "type": f"sentence_transformers.models.{name}",
            }
            for i, name in enumerate(names)
        ]
        mode = {"cls": "cls_token", "mean": "mean_tokens"}.get(pooling, pooling)
        modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        documents["1_Pooling/config.json"] = {
            "word_embedding_dimension": 64,
            **{f"pooling_mode_{each}": each == mode for each in modes},
        }
        documents["sentence_bert_config.json"] = {"max_seq_length": 300, "do_lower_case": False}
    for name, document in {**documents, **(files or {})}.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document))
    raws = {prefix + name: _raw(name, values, dtype) for name, values in bert_weights().items()}
    write_safetensors(directory / "model.safetensors", raws)
    return directory


def tokenizer_document() -> dict[str, Any]:
    """``tokenizer.json``: WordPiece, lower case, [CLS] text [SEP], truncated as trained."""
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in enumerate(SPECIALS)
    ]
    cls, sep = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ("[CLS]", "[SEP]"))
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "version": "1.0",
        "truncation": {
            "direction": "Right",
            "max_length": 128,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [cls, first, sep],
            "pair": [cls, first, sep, second, sep],
            "special_tokens": {
                text: {"id": text, "ids": [i], "tokens": [text]}
                for text, i in (("[CLS]", CLS), ("[SEP]", SEP))
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {text: i for i, text in enumerate(VOCABULARY)},
        },
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (CONFIG["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (MAX_LENGTH, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        **_norm("embeddings.LayerNorm", hidden),
        # What the checkpoints hold and embeddings do not need.
        **_dense("pooler.dense", hidden, hidden),
    }
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for part in ("query", "key", "value"):
            shapes |= _dense(f"{layer}attention.self.{part}", hidden, hidden)
        shapes |= _dense(f"{layer}attention.output.dense", hidden, hidden)
        shapes |= _norm(f"{layer}attention.output.LayerNorm", hidden)
        shapes |= _dense(f"{layer}intermediate.dense", inner, hidden)
        shapes |= _dense(f"{layer}output.dense", hidden, inner)
        shapes |= _norm(f"{layer}output.LayerNorm", hidden)
    return shapes


def _dense(name: str, rows: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, width), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Even draws; large enough that attention and GELU matter."""
    raw = np.random.PCG64(zlib.crc32(f"bert/{name}".encode())).random_raw(int(np.prod(shape)))
    unit = ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0) * np.sqrt(3.0)
    if name.endswith("LayerNorm.weight"):
        values = 1.0 + 0.2 * unit
    elif name.endswith("bias"):
        values = 0.3 * unit
    elif name.startswith("embeddings."):
        values = unit
    else:
        values = unit * 1.5 / np.sqrt(shape[-1])
    return values.astype(np.float32).reshape(shape)


def _raw(name: str, values: np.ndarray, dtype: str) -> RawTensor:
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return requantize(RawTensor(name=name, format="F32", shape=values.shape, data=data), dtype)
