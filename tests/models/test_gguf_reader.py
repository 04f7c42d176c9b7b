"""The GGUF reader against good files, every truncation, flipped bits, and absurd numbers."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_writer import Tensor, write_gguf
from helpers.tiny_models import tiny_gguf, tiny_weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostep.contracts.errors import ModelFileError, TwostepError, UnsupportedModelError
from twostep.models.loader import open_checkpoint
from twostep.models.loader.gguf import GGUFFile
from twostep.models.registry import load_model
from twostep.ops.formats import FORMATS, dequantize
from twostep.ops.reference.backend import ReferenceWeights

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.number": 7,
    "a.float": 0.5,
    "a.words": ["one", "", "zwei ü", "three"],
    "a.numbers": [3, -1, 4],
    "a.floats": [0.25, 1.5],
}


def small_tensors() -> list[Tensor]:
    values = np.arange(64, dtype=np.float32)
    return [
        Tensor("first", (64,), "F32", values),
        Tensor("second", (2, 32), "Q8_0", np.arange(68, dtype=np.uint8)),
    ]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", METADATA, small_tensors())


def test_reads_what_was_written(small: Path) -> None:
    file = GGUFFile(small)
    assert dict(file.metadata) == METADATA
    assert file.metadata.length("a.words") == 4
    assert list(file.tensors) == ["first", "second"]
    assert file.tensors["second"].shape == (2, 32)
    for tensor in small_tensors():
        entry = file.tensors[tensor.name]
        assert (entry.format, entry.nbytes) == (tensor.format, tensor.data.nbytes)
        assert file.data(entry).tobytes() == tensor.data.tobytes()
    file.close()
    file.close()


def test_alignment_is_honoured(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "wide.gguf", METADATA, small_tensors(), alignment=256)
    file = GGUFFile(path)
    assert file.tensors["second"].start % 256 == 0
    assert file.data(file.tensors["second"]).tobytes() == small_tensors()[1].data.tobytes()
    file.close()


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tiny_gguf(tmp_path, "llama", "Q4_1")
    theirs, ours = gguf.GGUFReader(path), GGUFFile(path)
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert ours.data(entry).tobytes() == tensor.data.tobytes()
    tokens = theirs.fields["tokenizer.ggml.tokens"].contents()
    assert ours.metadata["tokenizer.ggml.tokens"] == tokens
    ours.close()


def check_error(error: TwostepError, path: Path) -> None:
    text = str(error)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 700


def test_every_truncation_is_told(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    end = GGUFFile(small).tensors["second"]
    for length in range(end.start + end.nbytes):
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError) as caught:
            GGUFFile(path)
        check_error(caught.value, path)


def test_flipped_bits_end_well(small: Path, tmp_path: Path) -> None:
    """Either the file still reads, or one line says what is wrong; never much memory."""
    data = bytearray(small.read_bytes())
    path = tmp_path / "flipped.gguf"
    header = GGUFFile(small).tensors["first"].start
    refused = 0
    tracemalloc.start()
    for position in range(header):
        for bit in (1, 7):
            data[position] ^= 1 << bit
            path.write_bytes(data)
            refused += not reads(path)
            data[position] ^= 1 << bit
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > header // 2
    assert peak < 4_000_000


def reads(path: Path) -> bool:
    try:
        file = GGUFFile(path)
        for key in file.metadata:
            _ = file.metadata[key]
        file.close()
    except TwostepError as error:
        check_error(error, path)
        return False
    return True


@pytest.mark.parametrize(
    ("offset", "value", "field"),
    [
        (0, b"GGML", "magic"),
        (4, struct.pack("<I", 1), "version"),
        (4, struct.pack(">I", 3), "version"),
        (8, struct.pack("<Q", 1 << 60), "tensor_count"),
        (16, struct.pack("<Q", 1 << 63), "metadata_kv_count"),
        (24, struct.pack("<Q", 1 << 62), "metadata key 0"),
    ],
)
def test_bad_headers_name_the_field(
    small: Path, tmp_path: Path, offset: int, value: bytes, field: str
) -> None:
    data = bytearray(small.read_bytes())
    data[offset : offset + len(value)] = value
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=field):
        GGUFFile(path)


@pytest.mark.parametrize("length", [1 << 63, 100_000])
def test_overlong_strings_name_their_array(small: Path, length: int) -> None:
    data = small.read_bytes()
    path = small.with_name("bad.gguf")
    path.write_bytes(
        data.replace(struct.pack("<Q", 5) + b"three", struct.pack("<Q", length) + b"three")
    )
    with pytest.raises(ModelFileError, match=r"a\.words: needs"):
        GGUFFile(path)


def write_directory(path: Path, entries: list[tuple[str, list[int], int, int]]) -> Path:
    """A file of nothing but a tensor directory, exactly as told, and 4096 bytes of data."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), 0)
    for name, dimensions, kind, offset in entries:
        head += struct.pack("<Q", len(name)) + name.encode()
        head += struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", kind, offset)
    path.write_bytes(head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(4096))
    return path


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([("w", [64], 0, 0), ("w", [64], 0, 256)], "twice"),
        ([("w", [64], 0, 0), ("v", [64], 0, 128)], "inside another"),
        ([("w", [64], 0, 7)], "multiple of 32"),
        ([("w", [64], 0, 4096)], "cut short"),
        ([("w", [64], 0, (1 << 64) - 32)], "cut short"),
        ([("w", [1 << 62, 4], 0, 0)], "cannot fit"),
        ([("w", [(1 << 64) - 1, (1 << 64) - 1], 0, 0)], "cannot fit"),
        ([("w", [0], 0, 0)], "cannot fit"),
        ([("w", [33], 8, 0)], "not a multiple of Q8_0"),
        ([("w", [1, 1, 1, 1, 1], 0, 0)], "5 dimensions"),
        ([("w", [32], 4, 0)], "unknown tensor type 4"),
        ([("w", [256], 10, 0)], "Q2_K is not supported"),
    ],
)
def test_bad_directories_name_the_tensor(
    tmp_path: Path, entries: list[tuple[str, list[int], int, int]], problem: str
) -> None:
    path = write_directory(tmp_path / "bad.gguf", entries)
    with pytest.raises(TwostepError, match=problem) as caught:
        GGUFFile(path)
    check_error(caught.value, path)
    assert f": {entries[-1][0]}: " in str(caught.value)


def test_names_out_of_a_broken_file_cannot_break_the_message(tmp_path: Path) -> None:
    name = "evil\nname\x1b[31m" + "x" * 5000
    path = write_directory(tmp_path / "bad.gguf", [(name, [64], 0, 7)])
    with pytest.raises(ModelFileError) as caught:
        GGUFFile(path)
    check_error(caught.value, path)
    assert "\x1b" not in str(caught.value)


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(ModelFileError, match="cut short"):
        GGUFFile(empty)
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUFFile(tmp_path)


def test_split_files(tmp_path: Path) -> None:
    first = tiny_gguf(tmp_path, "qwen2", "F32", parts=3)
    whole = open_checkpoint(tiny_gguf(tmp_path, "qwen2", "F32"))
    parts = open_checkpoint(first.with_name(first.name.replace("00001", "00002")))
    assert parts.names == whole.names
    for name in whole.names:
        assert parts.tensor(name).data.tobytes() == whole.tensor(name).data.tobytes()
    parts.close()
    missing = first.with_name(first.name.replace("00001", "00003"))
    missing.unlink()
    with pytest.raises(ModelFileError, match=f"{missing.name}.*is missing"):
        open_checkpoint(first)


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_logical_tensors_have_the_weights(fmt: str, tmp_path: Path) -> None:
    """q is permuted for neighbouring pairs, so it is compared as a set of rows."""
    checkpoint = open_checkpoint(tiny_gguf(tmp_path, "llama", fmt))
    wide = FORMATS[fmt].block_length > 32
    weights = tiny_weights("llama", wide=wide)
    assert checkpoint.names == set(weights)
    for name, values in weights.items():
        raw = checkpoint.tensor(name)
        assert raw.shape == values.shape
        if fmt in ("F32", "BF16"):
            got = dequantize(raw)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                assert not np.array_equal(got, values)
                got, values = np.sort(got, axis=0), np.sort(values, axis=0)
            np.testing.assert_array_equal(got, values)
    assert checkpoint.weight_bytes >= sum(checkpoint.tensor(n).data.size for n in weights)
    checkpoint.close()


def test_experts_are_slices_of_their_stack(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf(tmp_path, "qwen3_moe", "F32"))
    weights = tiny_weights("qwen3_moe")
    assert checkpoint.names == set(weights)
    for expert in (0, 5, 7):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        np.testing.assert_array_equal(dequantize(checkpoint.tensor(name)), weights[name])
    checkpoint.close()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_models_end_well(data: st.DataObject, tmp_path: Path) -> None:
    """Bytes of a whole model changed or cut: it loads, or one line says why not."""
    source = tmp_path / "llama-Q8_0.gguf"
    if not source.exists():
        tiny_gguf(tmp_path, "llama", "Q8_0")
    content = bytearray(source.read_bytes())
    header = min(entry.start for entry in GGUFFile(source).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        # Most damage goes where it hurts: numbers of metadata and directory.
        position = data.draw(st.integers(0, header) | st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        load_model(checkpoint, ReferenceWeights())
        checkpoint.close()
    except TwostepError as error:
        check_error(error, path)
