"""Tiny random-weight checkpoints of every architecture, as files on disk.

The weights are a pure function of a tensor's name, so that golden files need to hold only the
logits, and a Hugging Face directory and a GGUF file of one case are the same model.

    tiny_hf_dir(tmp_path, "qwen3")             a directory: config.json, safetensors, tokenizer
    tiny_gguf(tmp_path, "qwen3", "Q8_0")       a .gguf file in any format of ``FORMATS``
    CASES                                      what "qwen3" may be
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from helpers.gguf_convert import gguf_metadata, gguf_tensors
from helpers.gguf_writer import Tensor, write_gguf
from helpers.tiny_text import SPECIALS, VOCAB_SIZE, tokenizer_config, tokenizer_json

from twostep.ops.formats import FORMATS, packed_bytes, quantize, requantize
from twostep.ops.protocol import RawTensor

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope": {"rope_theta": 10000.0},
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "rope": {"rope_theta": 500000.0, **_LLAMA3},
    },
    "llama_tied": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "rope": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
    },
    "mistral": {
        "model_type": "mistral",
        "head_dim": 32,
        "sliding_window": 9,
        "num_key_value_heads": 1,
    },
    "qwen2": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 8,
        "rope": {"rope_theta": 1000000.0},
    },
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "max_position_embeddings": 128,
        "rope": {"rope_theta": 1000000.0, **_YARN},
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope": {"rope_theta": 1000000.0, **_YARN, "original_max_position_embeddings": 256},
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "intermediate_size": 64,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 9,
        "final_logit_softcapping": 12.0,
        "rms_norm_eps": 1e-6,
        "rope": {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 8.0},
        "rope_local": {"rope_theta": 10000.0},
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 2,
    },
    "qwen3_moe_mixed": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    },
}
"""Names that ``tiny_hf_dir`` and ``tiny_gguf`` take, with what differs from ``_BASE``."""

# Every size a multiple of 256, for formats with blocks of 256.
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}

PROMPT_LENGTH = 40


def prompt(case: str) -> list[int]:
    """40 token ids (longer than every sliding window), none of them special."""
    draws = np.random.PCG64(zlib.crc32(case.encode())).random_raw(PROMPT_LENGTH)
    first = len(SPECIALS)
    return [first + int(value % np.uint64(VOCAB_SIZE - first)) for value in draws]


def tiny_config(case: str, *, wide: bool = False, **numbers: int) -> dict[str, Any]:
    """The numbers of a case, rotary settings still under ``rope`` and ``rope_local``.

    ``numbers`` replace those of the case.
    """
    config = {**_BASE, **CASES[case], **numbers}
    if wide:
        config |= _WIDE
        config |= {"moe_intermediate_size": 256} if "num_experts" in config else {}
    return config


def config_json(case: str, *, wide: bool = False, spelling: str = "v4") -> dict[str, Any]:
    """``config.json`` as transformers 4 (``rope_scaling``) or 5 (``rope_parameters``) writes it."""
    config = tiny_config(case, wide=wide)
    rope, local = config.pop("rope"), config.pop("rope_local", None)
    if spelling == "v5":
        full = {"rope_type": "default", **rope}
        if local is None:
            return {**config, "rope_parameters": full}
        layers = {"full_attention": full, "sliding_attention": {"rope_type": "default", **local}}
        return {**config, "rope_parameters": layers}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling or None}
    if local is not None:
        config["rope_local_base_freq"] = local["rope_theta"]
    return config


def tiny_weights(case: str, *, wide: bool = False, **numbers: int) -> dict[str, np.ndarray]:
    """All tensors by Hugging Face name: float32 arrays whose values bf16 can hold."""
    shapes = _shapes(tiny_config(case, wide=wide, **numbers))
    return {name: _values(name, shape, case) for name, shape in shapes.items()}


def tiny_hf_dir(
    tmp_path: Path,
    case: str,
    *,
    dtype: str = "BF16",
    shards: int = 1,
    wide: bool = False,
    spelling: str = "v4",
) -> Path:
    """Write a case in Hugging Face layout and return its directory.

    Args:
        tmp_path: Where; the directory is ``<case>-hf`` below it.
        case: A key of ``CASES``.
        dtype: F32, F16 or BF16.
        shards: Above 1: so many files, and an index.
        wide: Sizes that are multiples of 256.
        spelling: ``v4`` or ``v5``, how transformers of that version spells rotary settings.
    """
    directory = tmp_path / f"{case}-hf"
    directory.mkdir(parents=True, exist_ok=True)
    config = config_json(case, wide=wide, spelling=spelling)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": [2, 0]}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    (directory / "tokenizer.json").write_text(tokenizer_json())
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    weights = tiny_weights(case, wide=wide)
    raws = {name: requantize(_f32(name, values), dtype) for name, values in weights.items()}
    if shards == 1:
        write_safetensors(directory / "model.safetensors", raws)
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(raws.items())[shard::shards])
        write_safetensors(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def tiny_gguf(
    tmp_path: Path,
    case: str,
    fmt: str = "Q8_0",
    *,
    wide: bool | None = None,
    parts: int = 1,
    **numbers: int,
) -> Path:
    """Write a case as a GGUF file and return its path (of the first part, if split).

    Matrices are in ``fmt``; norms, biases and routers in F32, as in real files. With Q8_0, Q4_0
    and Q4_1 the weights are those of ``tiny_weights``, quantised; with Q5_* and *_K they are
    random blocks of about the same spread.

    Args:
        tmp_path: Where; the file is ``<case>-<fmt>.gguf`` below it.
        case: A key of ``CASES``.
        fmt: A key of ``FORMATS``.
        wide: Sizes that are multiples of 256; None: only if ``fmt`` needs them.
        parts: Above 1: split into so many files.
        numbers: Of the configuration, in place of the case's; a larger ``vocab_size`` is filled
            up with tokens that no text has.
    """
    if wide is None:
        wide = FORMATS[fmt].block_length > 32
    config = tiny_config(case, wide=wide, **numbers)
    metadata = gguf_metadata(config)
    tensors = [
        _packed(name, values, fmt)
        for name, values in gguf_tensors(config, tiny_weights(case, wide=wide, **numbers)).items()
    ]
    if parts == 1:
        return write_gguf(tmp_path / f"{case}-{fmt}.gguf", metadata, tensors)
    for part in range(parts):
        split = {"split.no": part, "split.count": parts, "split.tensors.count": len(tensors)}
        path = tmp_path / f"{case}-{fmt}-{part + 1:05d}-of-{parts:05d}.gguf"
        write_gguf(path, ({**metadata} if part == 0 else {}) | split, tensors[part::parts])
    return tmp_path / f"{case}-{fmt}-00001-of-{parts:05d}.gguf"


def write_safetensors(path: Path, raws: dict[str, RawTensor]) -> Path:
    """Write tensors in F32, F16 or BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, raw in raws.items():
        end = offset + raw.data.size
        header[name] = {
            "dtype": raw.format,
            "shape": list(raw.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for raw in raws.values():
            file.write(raw.data.tobytes())
    return path


def _f32(name: str, values: np.ndarray) -> RawTensor:
    data = np.ascontiguousarray(values, dtype=np.float32).view(np.uint8).reshape(-1)
    return RawTensor(name=name, format="F32", shape=values.shape, data=data)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    model_type = config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if model_type == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{norm}.weight": (hidden,) for norm in norms}
        for part, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (rows, hidden)
            if model_type == "qwen2":
                shapes[f"{layer}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, width)
        if model_type in ("qwen3", "qwen3_moe", "gemma3_text"):
            for part in "qk":
                shapes[f"{layer}self_attn.{part}_norm.weight"] = (config["head_dim"],)
        if "num_experts" not in config or i in config["mlp_only_layers"]:
            shapes |= _mlp_shapes(f"{layer}mlp.", hidden, inner)
            continue
        shapes[f"{layer}mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            prefix = f"{layer}mlp.experts.{expert}."
            shapes |= _mlp_shapes(prefix, hidden, config["moe_intermediate_size"])
    return shapes


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _values(name: str, shape: tuple[int, ...], case: str) -> np.ndarray:
    """Even draws of unit variance, scaled as a trained model's weights would be."""
    seed = zlib.crc32(f"{case}/{name}".encode())
    count = int(np.prod(shape))
    uniform = (np.random.PCG64(seed).random_raw(count) >> np.uint64(11)).astype(np.float64)
    unit = (uniform * 2.0**-52 - 1.0) * np.sqrt(3.0)
    if name.endswith("norm.weight"):
        values = 0.2 * unit + (0.0 if case.startswith("gemma") else 1.0)
    elif name.endswith("bias"):
        values = 0.5 * unit
    elif name.endswith("embed_tokens.weight"):
        values = unit * (0.2 if case.startswith("gemma") else 1.0)
    else:
        values = unit * 1.5 / np.sqrt(shape[-1])
    bits = values.astype(np.float32).reshape(shape).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _packed(name: str, values: np.ndarray, fmt: str) -> Tensor:
    is_matrix = values.ndim >= 2 and "ffn_gate_inp" not in name
    if not is_matrix:
        return Tensor(name, values.shape, "F32", np.ascontiguousarray(values, "<f4"))
    if fmt in ("Q8_0", "Q4_0", "Q4_1"):
        return Tensor(name, values.shape, fmt, quantize(values, fmt))
    if FORMATS[fmt].is_quantized:
        return Tensor(name, values.shape, fmt, random_blocks(name, values.shape, fmt))
    return Tensor(name, values.shape, fmt, requantize(_f32(name, values), fmt).data)


def random_blocks(name: str, shape: tuple[int, ...], fmt: str) -> np.ndarray:
    """Bytes of a tensor in Q5_0, Q5_1 or a K format: random integers, weights about even in ±w."""
    seed = zlib.crc32(f"{name}/{fmt}".encode())
    size = packed_bytes(fmt, shape)
    words = np.random.PCG64(seed).random_raw(-(-size // 8))
    data = words.astype("<u8").view(np.uint8)[:size].copy()
    blocks = data.view(FORMATS[fmt].layout)
    reach = np.sqrt(3.0 / shape[-1]) * 1.5
    # Largest integer of a weight, times the largest of its sub-block's scale.
    levels = {"Q5_0": 16, "Q5_1": 15.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q6_K": 32}[fmt]
    inner = {"Q4_K": 63, "Q5_K": 63, "Q6_K": 127}.get(fmt, 1)
    blocks["d"] = reach / levels / inner
    if fmt == "Q5_1":
        blocks["m"] = -reach
    if fmt in ("Q4_K", "Q5_K"):
        # The same six bits for a scale and its minimum centre the weights on 0.
        blocks["m"] = reach / inner
        scales = blocks["scales"]
        scales[:, 4:8] = scales[:, 0:4]
        scales[:, 8:12] = (scales[:, 8:12] & 0x0F) | (scales[:, 8:12] << 4)
    return data
