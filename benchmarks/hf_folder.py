"""Writes models in Hugging Face layout: config.json, model.safetensors (bf16), tokenizer files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.models import SHAPES, Shape

MODEL_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
Tensor = tuple[str, tuple[int, ...], NDArray[np.uint16]]
"""(name, shape, bf16 bits)."""


def from_gguf(source: Path, folder: Path) -> None:
    """The same weights, dequantised to bf16, with the tokenizer that the GGUF file carries.

    Only for SmolLM2's shape; rows of q and k go back to the order that Hugging Face uses.
    """
    from twostep.models.loader.open import open_checkpoint
    from twostep.ops.formats import dequantize, requantize

    shape = SHAPES["smol"]
    folder.mkdir(parents=True)
    checkpoint = open_checkpoint(source)
    try:
        config = checkpoint.config
        assert (config.hidden_size, config.num_layers) == (shape.hidden, shape.layers), config
        interleaved = config.layers[0].rope.interleaved

        def tensors() -> Iterable[Tensor]:
            for name in sorted(checkpoint.names):
                raw = requantize(checkpoint.tensor(name), "F32")
                values = dequantize(raw)
                if interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
                    values = halves_apart(values, shape.head_dim)
                yield name, values.shape, to_bf16(values)

        names = {name: checkpoint.tensor(name).shape for name in sorted(checkpoint.names)}
        write_safetensors(folder / "model.safetensors", names, tensors())
        metadata = checkpoint.tokenizer.gguf_metadata
        assert metadata is not None
        write_tokenizer(folder, dict(metadata))
    finally:
        checkpoint.close()
    write_config(folder, shape, eos_token_id=int(metadata["tokenizer.ggml.eos_token_id"]))


def halves_apart(values: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Rows of each head from pairs (2i, 2i + 1) to (i, i + head_dim / 2)."""
    heads = values.reshape(-1, head_dim // 2, 2, values.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Float32 to the nearest bf16, ties to even, as bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], tensors: Iterable[Tensor]
) -> None:
    """A bf16 file, one tensor in memory at a time; ``tensors`` come in the order of ``shapes``.

    Format: 8 bytes of header length, a JSON header with offsets, then the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, shape, bits), expected in zip(tensors, shapes, strict=True):
            assert name == expected, (name, expected)
            assert tuple(shape) == tuple(shapes[name]), (name, shape)
            bits.tofile(file)


def write_config(folder: Path, shape: Shape, eos_token_id: int) -> None:
    """config.json and generation_config.json."""
    config = {
        "architectures": [MODEL_CLASSES[shape.architecture]],
        "model_type": shape.architecture,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.eps,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": eos_token_id,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")


def write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level GGUF vocabulary."""
    import tokenizers

    from twostep.frontend import pre_tokenizers

    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = list(metadata["tokenizer.ggml.token_type"])
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    kind = pre_tokenizers.kind_of(str(metadata.get("tokenizer.ggml.pre", "default")))
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    library = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
    library.pre_tokenizer = pre_tokenizers.build_pre_tokenizer(kind)
    library.decoder = tokenizers.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    library.add_special_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=True) for token in control]
    )
    library.save(str(folder / "tokenizer.json"))
    eos = tokens[int(metadata["tokenizer.ggml.eos_token_id"])]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
