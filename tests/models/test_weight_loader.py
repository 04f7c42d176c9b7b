"""What stands between a checkpoint and a backend: checks, ``--quantization``, memory, progress."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny_models import tiny_gguf, tiny_hf_dir, tiny_weights, write_safetensors

from twostep.contracts.errors import (
    ModelFileError,
    OutOfMemoryError,
    UnsupportedModelError,
    UsageError,
)
from twostep.models.loader import memory, open_checkpoint
from twostep.models.loader.mapped_file import MappedFile
from twostep.models.loader.memory import available_memory, require_memory
from twostep.models.loader.weights import estimate_packed_bytes
from twostep.models.registry import load_model
from twostep.ops.formats import is_finite, packed_bytes, requantize
from twostep.ops.protocol import LinearPrecision, RawTensor
from twostep.ops.reference.backend import ReferenceWeights


class Recorder:
    """A factory that keeps what it was handed."""

    def __init__(self) -> None:
        self.parts: dict[str, RawTensor] = {}
        self.precision: dict[str, str] = {}
        self.tied: bool | None = None

    def is_finite(self, tensor: RawTensor) -> bool:
        return is_finite(tensor)

    def linear(self, parts: list[RawTensor], *, precision: LinearPrecision) -> Any:
        self.parts |= {part.name: part for part in parts}
        self.precision |= {part.name: precision for part in parts}
        return parts

    def gated(self, gate: RawTensor, up: RawTensor, *, precision: LinearPrecision) -> Any:
        self.linear([gate, up], precision=precision)
        return gate, up

    def embedding(self, table: RawTensor, *, tied: bool, precision: LinearPrecision) -> Any:
        self.tied = tied
        return self.linear([table], precision=precision)

    def vector(self, tensor: RawTensor) -> Any:
        self.parts[tensor.name] = tensor
        return tensor


def load(path: Path, **options: Any) -> Recorder:
    recorder = Recorder()
    load_model(open_checkpoint(path), recorder, **options)
    return recorder


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3_moe", "gemma3"])
def test_every_tensor_is_handed_over_once(case: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    recorder = load(tiny_hf_dir(tmp_path, case), progress=lambda *pair: told.append(pair))
    names = set(tiny_weights(case))
    # Biases of q, k and v arrive as one vector.
    assert set(recorder.parts) == {
        n for n in names if not n.endswith(("k_proj.bias", "v_proj.bias"))
    }
    assert recorder.tied == ("lm_head.weight" not in names)
    assert told[-1] == (len(names), len(names))
    assert told == sorted(told)


@pytest.mark.parametrize("write", [tiny_hf_dir, tiny_gguf], ids=["hf", "gguf"])
def test_packed_tensors_leave_memory(write: Any, tmp_path: Path) -> None:
    """Each tensor is released after it was handed over; its bytes can still be read."""
    checkpoint = open_checkpoint(write(tmp_path, "qwen3_moe"))
    before = {name: checkpoint.tensor(name).data.tobytes() for name in checkpoint.names}
    released = []
    real = checkpoint.release
    checkpoint.release = lambda name: (released.append(name), real(name))  # type: ignore
    load_model(checkpoint, Recorder())
    assert sorted(released) == sorted(checkpoint.names)
    assert {name: checkpoint.tensor(name).data.tobytes() for name in checkpoint.names} == before


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_release_gives_resident_memory_back(tmp_path: Path) -> None:
    path = tmp_path / "large"
    size = 64_000_000
    path.write_bytes(bytes(size))
    file = MappedFile(path)
    assert int(file.bytes[::4096].sum()) == 0
    touched = resident_bytes()
    file.release(100, size - 100)
    assert touched - resident_bytes() > 0.9 * size
    file.close()


def test_qwen2_biases_lie_in_the_order_of_the_rows(tmp_path: Path) -> None:
    recorder = load(tiny_hf_dir(tmp_path, "qwen2"))
    weights = tiny_weights("qwen2")
    bias = recorder.parts["model.layers.1.self_attn.q_proj.bias"]
    expected = [weights[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv"]
    np.testing.assert_array_equal(bias.data.view(np.float32), np.concatenate(expected))


@pytest.mark.parametrize(
    ("precision", "fmt", "chosen"),
    [
        ("auto", "Q8_0", "int8"),
        ("int8", "Q4_1", "int8"),
        ("bf16", "Q8_0", "bf16"),
        ("auto", "BF16", "bf16"),
        ("int8", "F16", "bf16"),
    ],
)
def test_precision(precision: str, fmt: str, chosen: str, tmp_path: Path) -> None:
    recorder = load(tiny_gguf(tmp_path, "llama", fmt), precision=precision)
    assert set(recorder.precision.values()) == {chosen}


@pytest.mark.parametrize("word", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("case", ["qwen3_moe", "llama_tied"])
def test_quantization_at_load(word: str, case: str, tmp_path: Path) -> None:
    path = tiny_hf_dir(tmp_path, case)
    recorder = load(path, quantization=word)
    for name, raw in recorder.parts.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert raw.format == "Q8_0"
        elif len(raw.shape) == 2 and not name.endswith("mlp.gate.weight"):
            assert raw.format == word.upper()
        else:
            assert raw.format == "BF16"
        assert raw.data.size == packed_bytes(raw.format, raw.shape)
    total = sum(raw.data.size for raw in recorder.parts.values())
    slack = packed_bytes("BF16", (8, 64)) * 2
    assert abs(estimate_packed_bytes(open_checkpoint(path), word) - total) <= slack


def test_quantization_never_widens(tmp_path: Path) -> None:
    recorder = load(tiny_gguf(tmp_path, "llama", "Q4_0"), quantization="q8_0")
    assert recorder.parts["model.layers.0.mlp.up_proj.weight"].format == "Q4_0"
    recorder = load(tiny_gguf(tmp_path, "llama", "Q8_0"), quantization="q4_0")
    assert recorder.parts["model.layers.0.mlp.up_proj.weight"].format == "Q4_0"


def test_unknown_quantization(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--quantization q3_x: unknown; use one of q8_0"):
        load(tiny_hf_dir(tmp_path, "llama"), quantization="q3_x")


def spoil(directory: Path, name: str, change: Any) -> None:
    """Rewrite a checkpoint with one tensor changed (None: left out)."""
    raws = {}
    for key, values in tiny_weights("llama").items():
        new = change(values.copy()) if key == name else values
        if new is not None:
            data = np.ascontiguousarray(new, np.float32).view(np.uint8).reshape(-1)
            raws[key] = RawTensor(name=key, format="F32", shape=new.shape, data=data)
    write_safetensors(directory / "model.safetensors", raws)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_weights_are_refused(name: str, bad: float, tmp_path: Path) -> None:
    directory = tiny_hf_dir(tmp_path, "llama")

    def put(values: np.ndarray) -> np.ndarray:
        values.reshape(-1)[-1] = bad
        return values

    spoil(directory, name, put)
    with pytest.raises(ModelFileError, match=f"{name}: has NaN or infinite") as caught:
        load(directory)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [(lambda v: v[:, :32], r"shape \[64, 32\] but .* \[64, 64\]"), (lambda v: None, "is missing")],
)
def test_wrong_shape_and_missing_tensor(change: Any, problem: str, tmp_path: Path) -> None:
    directory = tiny_hf_dir(tmp_path, "llama")
    name = "model.layers.1.self_attn.o_proj.weight"
    spoil(directory, name, change)
    with pytest.raises(ModelFileError, match=f"{name}.*{problem}"):
        load(directory)


def test_rows_that_no_block_divides(tmp_path: Path) -> None:
    directory = tiny_hf_dir(tmp_path, "llama")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    raws = {}
    for key, values in tiny_weights("llama").items():
        cut = values[:80] if "gate_proj" in key or "up_proj" in key else values
        cut = cut[:, :80] if "down_proj" in key else cut
        data = np.ascontiguousarray(cut).view(np.uint8).reshape(-1)
        raws[key] = RawTensor(name=key, format="F32", shape=cut.shape, data=data)
    write_safetensors(directory / "model.safetensors", raws)
    assert load(directory).parts
    with pytest.raises(UnsupportedModelError, match="down_proj.*rows of 80.*leave out --quant"):
        load(directory, quantization="q8_0")


def test_weights_beyond_half_precision_scales(tmp_path: Path) -> None:
    directory = tiny_hf_dir(tmp_path, "llama")
    spoil(directory, "model.layers.0.mlp.up_proj.weight", lambda v: v * np.float32(1e9))
    with pytest.raises(UnsupportedModelError, match="beyond the range of Q4_0's scales"):
        load(directory, quantization="q4_0")


def test_memory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_hf_dir(tmp_path, "llama")
    monkeypatch.setattr("twostep.models.registry.available_memory", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match="the weights take 0.0 GB but only 0.0 GB"):
        load(path)
    require_memory(path, 1000, 1000)
    require_memory(path, 1000, None)


def test_memory_is_the_lesser_of_machine_and_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo, limit, usage, stat = (tmp_path / name for name in ("info", "max", "current", "stat"))
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP_FILES", ((limit, usage),))
    monkeypatch.setattr(memory, "_CGROUP_STATS", (stat,))
    assert available_memory() is None
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable:   500 kB\n")
    assert available_memory() == 500 * 1024
    limit.write_text("400000\n")
    usage.write_text("350000\n")
    assert available_memory() == 50_000
    stat.write_text("anon 7\ninactive_file 20000\n")
    assert available_memory() == 70_000
    limit.write_text("max\n")
    assert available_memory() == 500 * 1024


def test_quantised_models_stay_close(tmp_path: Path) -> None:
    """What --quantization makes is what requantize makes, end to end."""
    path = tiny_hf_dir(tmp_path, "llama")
    checkpoint = open_checkpoint(path)
    recorder = load(path, quantization="q4_1")
    name = "model.layers.0.self_attn.v_proj.weight"
    expected = requantize(checkpoint.tensor(name), "Q4_1")
    assert recorder.parts[name].data.tobytes() == expected.data.tobytes()
    assert load_model(checkpoint, ReferenceWeights(), quantization="q4_1").config
