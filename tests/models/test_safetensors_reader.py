"""The safetensors reader: single and sharded directories, damaged headers, files that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny_models import tiny_hf_dir, tiny_weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostep.contracts.errors import ModelFileError, TwostepError, UnsupportedModelError
from twostep.models.loader import open_checkpoint
from twostep.models.loader.safetensors import SafetensorsFile, open_safetensors
from twostep.models.registry import load_model
from twostep.ops.formats import dequantize
from twostep.ops.reference.backend import ReferenceWeights


def write_header(path: Path, header: Any, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_reads_what_was_written(tmp_path: Path, shards: int, dtype: str) -> None:
    checkpoint = open_checkpoint(tiny_hf_dir(tmp_path, "qwen2", dtype=dtype, shards=shards))
    weights = tiny_weights("qwen2")
    assert checkpoint.names == set(weights)
    for name, values in weights.items():
        raw = checkpoint.tensor(name)
        assert (raw.format, raw.shape) == (dtype, values.shape)
        np.testing.assert_allclose(dequantize(raw), values, rtol=0, atol=1e-7)
    size = {"F32": 4, "F16": 2, "BF16": 2}[dtype]
    assert checkpoint.weight_bytes == size * sum(values.size for values in weights.values())
    assert checkpoint.tokenizer.directory == checkpoint.path
    assert checkpoint.generation_config["eos_token_id"] == [2, 0]
    checkpoint.close()
    checkpoint.close()


def test_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    directory = tiny_hf_dir(tmp_path, "llama", dtype="F16")
    theirs = package.load_file(directory / "model.safetensors")
    ours = open_safetensors(directory)
    assert set(theirs) == set(ours)
    for name, values in theirs.items():
        file, found = ours[name]
        assert file.data(found).tobytes() == values.tobytes()


def test_gemma_norms_come_with_their_one(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_hf_dir(tmp_path, "gemma3"))
    weights = tiny_weights("gemma3")
    for name in ("model.norm.weight", "model.layers.3.self_attn.q_norm.weight"):
        np.testing.assert_array_equal(dequantize(checkpoint.tensor(name)), weights[name] + 1)


def test_multimodal_names_lose_their_prefix(tmp_path: Path) -> None:
    directory = tiny_hf_dir(tmp_path, "gemma3")
    plain = (directory / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", plain[:8])[0]
    for prefix in ("language_model.model.", "model.language_model."):
        text = plain[8 : 8 + length].replace(b'"model.', f'"{prefix}'.encode())
        text = text.replace(b"}}", b'}, "vision_tower.position_ids": ' + json_entry() + b"}")
        (directory / "model.safetensors").write_bytes(
            struct.pack("<Q", len(text)) + text + plain[8 + length :]
        )
        assert open_checkpoint(directory).names == set(tiny_weights("gemma3"))


def json_entry() -> bytes:
    return json.dumps(entry("I64", (0,), (0, 0))).encode()


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"{", "header: not JSON"),
        (b"[" * 100_000, "header: not JSON"),
        (b"[]", "header: not a JSON object"),
        (b'{"w": {}, "w": {}}', "appears twice"),
        ({"w": 3}, "w: not a tensor entry"),
        ({"w": {}}, "w: dtype"),
        ({"w": entry(shape=(-1,))}, "w: shape"),
        ({"w": {**entry(), "shape": "4"}}, "w: shape"),
        ({"w": {**entry(), "shape": [2.0, 2]}}, "w: shape"),
        ({"w": entry(offsets=(16, 0))}, "w: data_offsets"),
        ({"w": entry(offsets=(0,))}, "w: data_offsets"),
        ({"w": entry(offsets=(0, 12))}, r"w: shape \[4\] of F32 is not 12 bytes"),
        ({"w": entry(shape=(1 << 62,))}, "is not 16 bytes"),
        ({"w": entry(offsets=(60, 76))}, "w: needs"),
        ({"w": entry(), "v": entry(offsets=(8, 24))}, "v: data_offsets lie inside another"),
    ],
)
def test_bad_headers_name_the_field(tmp_path: Path, header: Any, problem: str) -> None:
    path = write_header(tmp_path / "bad.safetensors", header)
    with pytest.raises(ModelFileError, match=problem) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 1 << 62), b"\xff" * 8])
def test_bad_lengths(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="header"):
        SafetensorsFile(path)


def test_unread_dtypes_may_lie_beside(tmp_path: Path) -> None:
    header = {"w": entry(), "other": entry("F8_E4M3", (2,), (16, 18))}
    file = SafetensorsFile(write_header(tmp_path / "w.safetensors", header))
    assert file.data(file.tensors["w"]).size == 16
    with pytest.raises(UnsupportedModelError, match="other: dtype F8_E4M3"):
        file.data(file.tensors["other"])


def test_shards_that_are_not_there(tmp_path: Path) -> None:
    directory = tiny_hf_dir(tmp_path, "llama", shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match="model-00002-of-00002.safetensors: the shard is miss"):
        open_checkpoint(directory)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "", ".."])
def test_shards_stay_in_their_directory(tmp_path: Path, shard: str) -> None:
    directory = tiny_hf_dir(tmp_path, "llama")
    index = {"weight_map": {"model.norm.weight": shard}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match="weight_map"):
        open_checkpoint(directory)


def test_index_that_names_an_absent_tensor(tmp_path: Path) -> None:
    directory = tiny_hf_dir(tmp_path, "llama")
    index = {"weight_map": {"model.nowhere.weight": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"model.safetensors: tensor model.nowhere.weight is"):
        open_checkpoint(directory)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    directory = tiny_hf_dir(tmp_path, "llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="can carry code"):
        open_checkpoint(directory)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_models_end_well(data: st.DataObject, tmp_path: Path) -> None:
    directory = tmp_path / "llama-hf"
    if not directory.exists():
        tiny_hf_dir(tmp_path, "llama")
        (directory / "whole").write_bytes((directory / "model.safetensors").read_bytes())
    content = bytearray((directory / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 3000) | st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (directory / "model.safetensors").write_bytes(content)
    try:
        checkpoint = open_checkpoint(directory)
        load_model(checkpoint, ReferenceWeights())
        checkpoint.close()
    except TwostepError as error:
        check_line(str(error), directory)


def check_line(text: str, directory: Path) -> None:
    assert str(directory) in text
    assert "\n" not in text
