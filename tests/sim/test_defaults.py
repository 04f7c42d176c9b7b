"""Sizes an engine chooses on a device: the seed's, vLLM's table, KV arithmetic."""

from __future__ import annotations

import msgspec.structs
import pytest

from twostep.contracts.errors import OutOfMemoryError, UsageError
from twostep.sim.build import plan_sizes
from twostep.sim.defaults import Budgets, MemoryBudget, default_budgets, memory_budget
from twostep.sim.defaults import size_device_kv_cache as size
from twostep.sim.device import DEVICES, GIB, H100, cpu_device
from twostep.sim.model_facts import load_model_facts

LLAMA = load_model_facts("llama-3.1-8b")
CPU = cpu_device(name="cpu", memory_bandwidth=1e10, memory_bytes=1 << 34, peak_flops={"bf16": 1e11})


@pytest.mark.parametrize(
    ("device", "api", "offline"),
    [
        ("h100", (8192, 1024), (16384, 1024)),
        ("h200", (8192, 1024), (16384, 1024)),
        ("a100-80", (2048, 256), (8192, 256)),
        ("a100-40", (2048, 256), (8192, 256)),
        ("l4", (2048, 256), (8192, 256)),
    ],
)
def test_budgets_by_device(device: str, api: tuple[int, int], offline: tuple[int, int]) -> None:
    assert default_budgets(DEVICES[device], "api") == Budgets(*api)
    assert default_budgets(DEVICES[device], "offline") == Budgets(*offline)


def test_budgets_of_a_cpu_and_of_a_very_large_device() -> None:
    assert default_budgets(CPU, "api") == Budgets(2048, 128)
    assert default_budgets(CPU, "offline") == Budgets(4096, 256)
    large = msgspec.structs.replace(H100, memory_bytes=180 * GIB)
    assert default_budgets(large, "api") == Budgets(16384, 1024)


def test_case_44_kv_sizing() -> None:
    """2 MiB a block of 16; 40 GiB are 20,480 blocks; 2.5 requests of 131,072 tokens."""
    memory = MemoryBudget(total=80 * GIB, usable=56 * GIB, weights=15 * GIB, activations=GIB)
    sizing = size(LLAMA, memory, Budgets(8192, 1024), max_model_len=131_072)
    assert memory.kv_cache == 40 * GIB
    assert sizing.block_bytes == 2 << 20
    assert sizing.num_blocks == 20_480
    assert round(sizing.max_concurrency, 1) == 2.5


def test_memory_of_the_seeds_machine() -> None:
    """0.92 of 80 GiB, less 8.03 B weights in two bytes, less the largest step."""
    memory = memory_budget(LLAMA, H100, Budgets(8192, 1024))
    assert memory.usable == int(0.92 * 80 * GIB)
    assert memory.weights == LLAMA.weight_bytes
    # Per token 2 * (2 * 4096 + 3 * 14336) bytes; logits 1024 * 128256 * 4 * 2.
    assert memory.activations == 8192 * 2 * (8192 + 43008) + 1024 * 128_256 * 8
    config, sizing = plan_sizes(LLAMA, H100)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (8192, 1024)
    assert sizing.num_blocks == memory.kv_cache // (2 << 20)


def test_weights_that_do_not_fit() -> None:
    facts = load_model_facts("llama-3.1-70b")
    with pytest.raises(OutOfMemoryError, match=r"131.4 GiB of weights .* --tensor-parallel-size"):
        plan_sizes(facts, H100)
    _, sizing = plan_sizes(facts, H100, tensor_parallel_size=4)
    # 8 KV heads on 4 devices: a quarter of 320 KiB a token.
    assert sizing.block_bytes == 16 * (320 << 10) // 4
    _, shared = plan_sizes(facts, H100, tensor_parallel_size=16)
    assert shared.block_bytes == 16 * (320 << 10) // 8  # a head is never cut
    with pytest.raises(UsageError, match="64 attention heads cannot be shared out evenly"):
        plan_sizes(facts, H100, tensor_parallel_size=3)


def test_sizes_that_a_user_asks_for() -> None:
    config, sizing = plan_sizes(
        LLAMA,
        H100,
        max_num_seqs=4096,
        max_num_batched_tokens=512,
        max_model_len=1024,
        kv_cache_memory_bytes=GIB,
    )
    # A request needs a token of budget in every step.
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (512, 512)
    assert sizing.num_blocks == 512
    with pytest.raises(UsageError, match="was trained for 131072 tokens"):
        plan_sizes(LLAMA, H100, max_model_len=131_073)
    config, _ = plan_sizes(LLAMA, H100, max_model_len=100, max_num_seqs=2)
    assert config.max_num_batched_tokens == 200  # no step can have more
