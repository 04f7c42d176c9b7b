"""Models of real shapes with random weights, written tensor by tensor: for speed, not for sense.

Quantised weights are drawn as blocks, not computed from floats: their integers are random bytes,
their scales one constant that gives weights of deviation ``hidden ** -0.5``, negated in half the
blocks so that the mean is zero. A part of a tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import hf_folder
from benchmarks.models import Shape
from twostep.models.loader.names import hf_name

MATRIX_TYPES = {"Q4_0": "Q6_K", "Q4_K": "Q6_K", "Q8_0": "Q8_0", "BF16": "BF16"}
"""Type of the layers' matrices → type of the output layer (and of the table it may be), as
``llama-quantize`` chooses them."""
PART_BYTES = 1 << 26


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """{GGUF name: shape, outermost first}."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab, shape.hidden)}
    if not shape.tied:
        shapes["output.weight"] = (shape.vocab, shape.hidden)
    shapes["output_norm.weight"] = (shape.hidden,)
    for layer in range(shape.layers):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (shape.hidden,),
            "attn_q": (query, shape.hidden),
            "attn_k": (key, shape.hidden),
            "attn_v": (key, shape.hidden),
            "attn_output": (shape.hidden, query),
            "ffn_norm": (shape.hidden,),
            "ffn_gate": (shape.inner, shape.hidden),
            "ffn_up": (shape.inner, shape.hidden),
            "ffn_down": (shape.hidden, shape.inner),
        }
        if shape.architecture == "qwen3":
            parts |= {"attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,)}
        shapes |= {f"blk.{layer}.{name}.weight": size for name, size in parts.items()}
    return shapes


def type_of(name: str, size: tuple[int, ...], matrix_type: str, tied: bool) -> str:
    """Type of a tensor: norms F32, the output layer's table finer than the rest."""
    if len(size) == 1:
        return "F32"
    if name == "output.weight" or (name == "token_embd.weight" and tied):
        return MATRIX_TYPES[matrix_type]
    return matrix_type


def write_gguf(path: Path, shape: Shape, matrix_type: str, *, name: str) -> None:
    """A GGUF file of random weights.

    Raises:
        ValueError: A row is not a whole number of blocks.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), shape.architecture)
    add_metadata(writer, shape, name)
    directory = {}
    for tensor, size in tensor_shapes(shape).items():
        kind = type_of(tensor, size, matrix_type, shape.tied)
        number = gguf.GGMLQuantizationType[kind]
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[number]
        if size[-1] % per_block:
            raise ValueError(f"{tensor}: rows of {size[-1]} are not whole blocks of {kind}")
        nbytes = int(np.prod(size)) // per_block * block_bytes
        directory[tensor] = (kind, nbytes)
        byte_size = (*size[:-1], size[-1] // per_block * block_bytes)
        if kind == "F32":
            writer.add_tensor_info(tensor, size, np.dtype(np.float32), nbytes)
        else:
            writer.add_tensor_info(tensor, byte_size, np.dtype(np.uint8), nbytes, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    alignment = 32
    generator = np.random.default_rng(0)
    with path.open("ab") as file:
        file.write(b"\0" * (-file.tell() % alignment))
        for tensor, (kind, nbytes) in directory.items():
            for part in random_bytes(generator, kind, nbytes, shape, tensor):
                file.write(memoryview(part).cast("B"))
            file.write(b"\0" * (-nbytes % alignment))


def add_metadata(writer: Any, shape: Shape, name: str) -> None:
    """Everything but the tensors; the vocabulary is made up."""
    writer.add_name(f"{name} (random weights)")
    writer.add_context_length(shape.max_position)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.vocab)
    vocabulary = made_up_vocabulary(shape)
    writer.add_tokenizer_model(vocabulary["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(vocabulary["tokenizer.ggml.pre"])
    writer.add_token_list(vocabulary["tokenizer.ggml.tokens"])
    writer.add_token_types(vocabulary["tokenizer.ggml.token_type"])
    writer.add_token_merges(vocabulary["tokenizer.ggml.merges"])
    writer.add_eos_token_id(vocabulary["tokenizer.ggml.eos_token_id"])
    writer.add_add_bos_token(False)


def made_up_vocabulary(shape: Shape) -> dict[str, Any]:
    """256 bytes, words without a meaning, one end-of-text token; a byte-level vocabulary."""
    letters = byte_letters()
    words = [f"w{number}" for number in range(shape.vocab - len(letters) - 2)]
    tokens = [*letters, "Ġt", *words, "<|endoftext|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if shape.architecture == "qwen3" else "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def byte_letters() -> list[str]:
    """How byte-level vocabularies (GPT-2's) spell the 256 bytes: printable ones as themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def random_bytes(
    generator: np.random.Generator, kind: str, nbytes: int, shape: Shape, name: str
) -> Iterator[NDArray[Any]]:
    """The data of one tensor, in parts."""
    if kind == "F32":  # norms
        yield np.ones(nbytes // 4, dtype=np.float32)
        return
    deviation = shape.hidden**-0.5
    block = BLOCKS[kind].itemsize
    per_part = PART_BYTES // block
    for start in range(0, nbytes // block, per_part):
        count = min(per_part, nbytes // block - start)
        yield random_blocks(generator, kind, count, deviation)


BLOCKS = {
    "Q4_0": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    "Q4_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
    "BF16": np.dtype([("v", "<u2")]),
}
SUB_SCALE = 32
"""Of every sub-block of a k-quant, in units of d."""
Q4_K_SCALES = bytes([SUB_SCALE | 2 << 6] * 8 + [0] * 4)
"""Eight scales and eight minima of 32, six bits each (2 << 6: the upper two of the last four)."""


def random_blocks(
    generator: np.random.Generator, kind: str, count: int, deviation: float
) -> NDArray[Any]:
    """``count`` blocks of weights of that standard deviation and mean zero."""
    if kind == "BF16":
        values = generator.standard_normal(count, dtype=np.float32) * np.float32(deviation)
        return hf_folder.to_bf16(values)
    raw = generator.integers(0, 1 << 63, -(-count * BLOCKS[kind].itemsize // 8), dtype=np.int64)
    blocks = raw.view(np.uint8)[: count * BLOCKS[kind].itemsize].view(BLOCKS[kind])
    sign = np.where(np.arange(count) & 1, np.float16(-1), np.float16(1))
    if kind == "Q4_0":
        blocks["d"] = sign * np.float16(deviation / 4.64)  # integers -8 … 7 about zero
    elif kind == "Q8_0":
        blocks["d"] = sign * np.float16(deviation / 73.9)
    elif kind == "Q4_K":
        scale = deviation / (4.61 * SUB_SCALE)
        blocks["d"] = np.float16(scale)
        blocks["dmin"] = np.float16(7.5 * scale)
        blocks["scales"] = np.frombuffer(Q4_K_SCALES, dtype=np.uint8)
    else:
        blocks["scales"] = SUB_SCALE
        blocks["d"] = sign * np.float16(deviation / (18.5 * SUB_SCALE))
    return blocks


def write_hf(folder: Path, shape: Shape) -> None:
    """A Hugging Face folder with the very weights of the BF16 file of ``write_gguf``."""
    folder.mkdir(parents=True)
    shapes = {
        hf_name(name, shape.architecture): size for name, size in tensor_shapes(shape).items()
    }
    generator = np.random.default_rng(0)

    def tensors() -> Iterator[hf_folder.Tensor]:
        for name, size in shapes.items():
            if len(size) == 1:
                yield name, size, hf_folder.to_bf16(np.ones(size, dtype=np.float32))
                continue
            parts = random_bytes(generator, "BF16", 2 * size[0] * size[1], shape, name)
            bits = np.concatenate(list(parts)).reshape(size)
            # GGUF files of the Llama family have q and k in another order of rows.
            if shape.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                bits = hf_folder.halves_apart(bits, shape.head_dim)
            yield name, size, bits

    hf_folder.write_safetensors(folder / "model.safetensors", shapes, tensors())
    vocabulary = made_up_vocabulary(shape)
    hf_folder.write_tokenizer(folder, vocabulary)
    hf_folder.write_config(folder, shape, vocabulary["tokenizer.ggml.eos_token_id"])
