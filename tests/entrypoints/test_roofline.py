"""The roofline: bytes and operations of real weights, the bound, and what doctor makes of it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import tiny_gguf, tiny_hf_dir

from twostep.contracts.errors import UsageError
from twostep.entrypoints import model_speed, roofline_plot
from twostep.entrypoints.cli import doctor, doctor_model
from twostep.entrypoints.progress import Silent
from twostep.entrypoints.resolve import ResolvedModel, resolve
from twostep.entrypoints.roofline import ModelWork, Roof, Work
from twostep.models.loader.open import open_checkpoint

Capture = pytest.CaptureFixture[str]

# The tiny Llama: hidden 64, inner 96, 2 layers, 4 heads and 2 KV heads of 16; see tiny_models.
QKV, OUT, MLP = 64 * (64 + 32 + 32), 64 * 64, 3 * 64 * 96
LAYERS = 2 * (QKV + OUT + MLP)
FOR_ALL = LAYERS - (OUT + MLP)
"""What every token goes through; behind the last layer's keys only sampled tokens go on."""


def work_of(path: Path, **options: Any) -> tuple[ModelWork, int]:
    """(the counter, size of the vocabulary)."""
    with contextlib.closing(open_checkpoint(path)) as checkpoint:
        return ModelWork(checkpoint, **options), checkpoint.config.vocab_size


def test_decode_reads_every_weight_once(tmp_path: Path) -> None:
    """An untied table of embeddings lends single rows and does not count; the output layer does."""
    work, vocab = work_of(tiny_gguf(tmp_path, "llama", "Q8_0"), kv_dtype="fp16")
    matrices = LAYERS + vocab * 64
    kv = 2 * 2 * 2 * 16 * 2  # layers, K and V, KV heads, head_dim, bytes
    step = work.decode(3, context=10)
    assert step.num_bytes == matrices * 34 / 32 + 3 * 11 * kv
    assert step.operations["int8"] == 3 * 2 * matrices
    assert step.operations["fp32"] == 3 * 2 * 4 * 4 * 16 * 11  # layers, ops, heads, head_dim, keys


def test_prefill_reads_the_weights_once_a_step(tmp_path: Path) -> None:
    work, vocab = work_of(tiny_gguf(tmp_path, "llama", "Q8_0"), kv_dtype="fp16")
    kv = 2 * 2 * 2 * 16 * 2
    whole, cut = work.prefill(32, budget=32), work.prefill(32, budget=8)
    assert whole.num_bytes == (LAYERS + vocab * 64) * 34 / 32 + 32 * kv
    matrices = 3 * FOR_ALL + LAYERS + vocab * 64
    assert cut.num_bytes == matrices * 34 / 32 + (8 + 16 + 24) * kv // 2 + 32 * kv
    once = OUT + MLP + vocab * 64
    assert whole.operations["int8"] == cut.operations["int8"] == 2 * (32 * FOR_ALL + once)
    pairs = 32 * 33 // 2 + 32  # of the first layer, and of the last token in the last
    assert whole.operations["fp32"] == cut.operations["fp32"] == 4 * 4 * 16 * pairs


def test_kinds_of_arithmetic(tmp_path: Path) -> None:
    """bf16 weights use bf16 arithmetic where there is any; the exact path float32."""
    hf = tiny_hf_dir(tmp_path / "hf", "llama")
    stored = {work_of(hf, has_bf16_dot=True)[0].decode(1, 0).operations.keys() >= {"int8"}}
    assert stored == {False}
    gguf = tiny_gguf(tmp_path, "llama", "BF16")
    assert set(work_of(gguf, has_bf16_dot=True)[0].decode(1, 4).operations) == {"bf16"}
    assert set(work_of(gguf, has_bf16_dot=False)[0].decode(1, 4).operations) == {"fp32"}
    exact = work_of(tiny_gguf(tmp_path, "llama", "Q8_0"), exact=True, kv_dtype="fp16")[0]
    assert set(exact.decode(1, 4).operations) == {"fp32"}


def test_quantization_counts_what_is_kept_in_memory(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, "llama", "F32")
    work, vocab = work_of(path, quantization="q4_0", kv_dtype="fp16")
    step = work.decode(1, context=0)
    kv = 2 * 2 * 2 * 16 * 2
    assert step.num_bytes == LAYERS * 18 / 32 + vocab * 64 * 34 / 32 + kv
    assert "int8" in step.operations


def test_experts_count_by_use(tmp_path: Path) -> None:
    """Every token uses its experts only; a large batch reads all of them."""
    path = tiny_hf_dir(tmp_path, "qwen3_moe")
    with contextlib.closing(open_checkpoint(path)) as checkpoint:
        config = checkpoint.config
        work = ModelWork(checkpoint)
        experts = sum(
            checkpoint.tensor(name).data.size for name in checkpoint.names if ".experts." in name
        )
    one, many = work.decode(1, 0).num_bytes, work.decode(1000, 0).num_bytes
    share = config.num_experts_per_token / config.num_experts
    kv = work.decode(1, 1).num_bytes - one
    assert many - 1000 * kv - (one - kv) == pytest.approx((1 - share) * experts, rel=1e-6)


def test_what_binds() -> None:
    roof = Roof(bandwidth=10.0, rates={"int8": 100.0, "fp32": 50.0})
    assert roof.seconds(Work(num_bytes=100, operations={"int8": 100.0})) == (10.0, "memory")
    mixed = Work(num_bytes=10, operations={"int8": 100.0, "fp32": 100.0})
    assert roof.seconds(mixed) == (3.0, "arithmetic")
    assert mixed.intensity == 20.0


# -- measuring ------------------------------------------------------------------------------------


class SlowEngine:
    """Prefills one request in each step, then gives every request a token a step of one second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.left: dict[str, int] = {}
        self.waiting: list[tuple[str, int]] = []
        self.seen: list[list[int]] = []

    def clock(self) -> float:
        return self.now

    def add_request(self, prompt: Any, params: Any) -> str:
        self.seen.append(prompt["prompt_token_ids"])
        self.waiting.append((str(len(self.seen)), params.max_tokens))
        return self.waiting[-1][0]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left or self.waiting)

    def step(self) -> list[Any]:
        self.now += 1.0
        if self.waiting:
            name, count = self.waiting.pop(0)
            self.left[name] = count
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            outputs.append(output(name))
            if not self.left[name]:
                del self.left[name]
        return outputs


def output(name: str) -> Any:
    from twostep.contracts.results import CompletionOutput, RequestOutput

    one = CompletionOutput(index=0, text="", token_ids=[7])
    return RequestOutput(
        request_id=name, prompt=None, prompt_token_ids=[], outputs=[one], finished=False
    )


def test_decode_time_counts_steps_of_all_sequences() -> None:
    engine = SlowEngine()
    found = model_speed.decode_seconds(engine, 3, 5, 8, 50, rounds=2, clock=engine.clock)
    assert found == [1.0, 1.0]
    assert all(len(prompt) == 5 for prompt in engine.seen)
    assert len(engine.seen) == 3 + 2 * 3


def test_prefill_time_is_of_new_prompts() -> None:
    engine = SlowEngine()
    assert model_speed.prefill_seconds(engine, 6, 50, rounds=2, clock=engine.clock) == [1.0, 1.0]
    assert len({tuple(prompt) for prompt in engine.seen}) == 3


def test_share_of_the_roof() -> None:
    roof = Roof(bandwidth=1e9, rates={"int8": 1e12})
    work = Work(num_bytes=5e6, operations={"int8": 1e6})
    found = doctor_model.cell("decode B=2", 2, [0.02, 0.01, 0.5], work, roof)
    assert found["seconds"] == 0.02
    assert found["tokens_per_second"] == 100
    assert found["bound_by"] == "memory"
    assert found["share"] == pytest.approx(0.25)
    assert found["gop_s"] == pytest.approx(0.05)


# -- doctor ---------------------------------------------------------------------------------------

ROOFLINE = {
    "bandwidth_gb_s": {"1": 10.0, "2": 15.0},
    "gop_s": {kind: {"1": 50.0, "2": 100.0} for kind in doctor.ARITHMETIC},
}


@pytest.mark.parametrize(
    ("threads", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_thread_counts(threads: int, counts: list[int]) -> None:
    assert doctor.thread_counts(threads) == counts


@pytest.mark.parametrize("name", ["r.pdf", "r"])
def test_plot_needs_a_known_suffix(name: str) -> None:
    with pytest.raises(UsageError, match="ends with"):
        roofline_plot.check_plot(name)


@pytest.mark.timeout(240)  # the first import of matplotlib ever looks for the machine's fonts
def test_plot_draws_the_cells(tmp_path: Path) -> None:
    cell = {"name": "decode B=1", "intensity": 2.0, "gop_s": 20.0, "share": 0.67}
    model = {"model": "tiny", "cells": [cell]}
    for suffix, begin in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        file = roofline_plot.check_plot(str(tmp_path / f"roof{suffix}"))
        roofline_plot.draw(file, "A CPU", ROOFLINE, model)
        assert file.read_bytes().startswith(begin)
    roofline_plot.draw(tmp_path / "alone.svg", "A CPU", ROOFLINE, None)


@pytest.mark.native
def test_a_real_model_under_its_roof(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("twostep._native")
    model: ResolvedModel = resolve(tiny_gguf(tmp_path, "llama", "Q8_0"), Silent())
    found = doctor_model.examine_model(
        model, "tiny", ROOFLINE, threads=1, quantization=None, isa="avx2", reporter=Silent()
    )
    json.dumps(found, allow_nan=False)
    names = [cell["name"] for cell in found["cells"]]
    assert names == ["decode B=1", "decode B=16", "prefill 255"]
    for cell in found["cells"]:
        assert cell["share"] > 0
        assert cell["tokens_per_second"] > 0
    assert found["weight_bytes"] > 0
    assert "of the roofline" in " ".join(text for row in doctor_model.rows(found) for text in row)


@pytest.mark.native
@pytest.mark.parametrize("kind", doctor.ARITHMETIC)
def test_peaks_of_every_instruction_set(kind: str) -> None:
    native = pytest.importorskip("twostep._native")
    for isa in native.cpu_info()["isas"]:
        assert native.measure_peak(isa, kind, 1) > 0
    with pytest.raises(ValueError, match="kind is"):
        native.measure_peak("scalar", "fp64", 1)
    with pytest.raises(ValueError, match="no threads"):
        native.measure_peak("scalar", kind, 0)
