"""Costs worked out by hand."""

from __future__ import annotations

from types import MappingProxyType

import msgspec.structs
import numpy as np
import pytest

from twostep.config.model import LayerConfig, ModelConfig, RopeConfig
from twostep.contracts.errors import UsageError
from twostep.runner.graphs import BatchDescriptor, GraphMode
from twostep.sim.device import DEVICES, H100, L4, SimDevice, cpu_device, find_device
from twostep.sim.model_facts import ModelFacts, load_model_facts
from twostep.sim.step_cost import StepCostModel, visible_pairs

ROPE = RopeConfig(theta=1e4, rotary_dim=4)
# One layer: q 8x8, k and v 8x4 each, output 8x8 = 192; mlp 3 * 8 * 16 = 384; norms 2 * 8 + 8.
TINY = ModelConfig(
    architecture="llama",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    layers=(LayerConfig(rope=ROPE), LayerConfig(rope=ROPE)),
    max_position=1000,
)
FACTS = ModelFacts(name="tiny", config=TINY)
DEVICE = SimDevice(
    name="slide rule",
    peak_flops=MappingProxyType({"bf16": 2000.0}),
    memory_bandwidth=400.0,
    memory_bytes=1 << 20,
    link_bandwidth=100.0,
    compute_efficiency=0.5,  # 1000 FLOP/s
    bandwidth_efficiency=0.25,  # 100 bytes/s
    kernel_launch=1.0,
    graph_launch=10.0,
    graph_kernel=0.1,
    link_latency=0.5,
)
FULL_1 = BatchDescriptor(GraphMode.FULL, 1, 1)


def test_facts_of_a_tiny_model() -> None:
    assert FACTS.attention_params == 192
    assert FACTS.layer_params(None) == 2 * (192 + 384)
    assert FACTS.norm_params == 2 * 16 + 8
    assert FACTS.num_params == 1152 + 40 + 2 * 80
    assert FACTS.weight_bytes == 2 * FACTS.num_params
    assert FACTS.kv_bytes_per_token == 2 * 2 * 4 * 2  # layers, k and v, head_dim, bf16
    assert FACTS.num_kernels == 2 * 9 + 2


@pytest.mark.parametrize(
    ("name", "params", "kv_bytes"),
    [
        # Parameter counts as the models' cards and weight indexes give them.
        ("llama-3.1-8b", 8_030_261_248, 128 << 10),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496, 320 << 10),
        ("Qwen/Qwen3-8B", 8_190_735_360, 144 << 10),
    ],
)
def test_shipped_models(name: str, params: int, kv_bytes: int) -> None:
    facts = load_model_facts(name)
    assert facts.num_params == params
    assert facts.kv_bytes_per_token == kv_bytes


def test_a_decode_is_bound_by_reading_weights() -> None:
    cost = StepCostModel(FACTS, DEVICE).predict(FULL_1, [1], [9], num_logits=1)
    assert cost.weights == pytest.approx(2 * 1152 / 100)
    assert cost.compute == 0.0
    # 10 keys in 2 layers: 4 * 2 heads * 4 dims FLOPs each; 10 read and 1 written, 16 bytes a layer.
    assert (cost.attention_flops, cost.kv_bytes) == (2 * 32 * 10, 2 * 16 * 11)
    assert cost.attention == pytest.approx(352 / 100)
    assert cost.logits == pytest.approx(160 / 100)
    assert cost.sampling == pytest.approx(10 * 4 * 2 / 100)
    # One graph, 20 kernels inside, 3 for the sampler.
    assert cost.launch == pytest.approx(10 + 20 * 0.1 + 3)
    assert cost.num_launches == 4
    assert cost.communication == 0.0
    assert cost.total == pytest.approx(23.04 + 3.52 + 1.6 + 0.8 + 15)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    graph = BatchDescriptor(GraphMode.NONE, 100, 1)
    cost = StepCostModel(FACTS, DEVICE).predict(graph, [100], [0], num_logits=1)
    assert cost.weights == 0.0
    assert cost.compute == pytest.approx(100 * 2 * 1152 / 1000)
    assert cost.attention == pytest.approx(2 * 32 * 5050 / 1000)  # 100 * 101 / 2 pairs
    assert (cost.launch, cost.num_launches) == (pytest.approx(20 + 3), 23)


def test_piecewise_launches_attention_between_graphs() -> None:
    graph = BatchDescriptor(GraphMode.PIECEWISE, 8, 1)
    cost = StepCostModel(FACTS, DEVICE).predict(graph, [8], [0], num_logits=1)
    assert cost.launch == pytest.approx(3 * 10 + 18 * 0.1 + (2 + 3) * 1)
    assert cost.num_launches == 3 + 2 + 3


def test_padding_is_computed() -> None:
    model = StepCostModel(FACTS, DEVICE)
    padded = model.predict(BatchDescriptor(GraphMode.FULL, 4, 4), [1] * 3, [9] * 3, num_logits=3)
    assert padded.layer_flops == 4 * 2 * 1152
    assert padded.kv_bytes == 3 * 352  # rows without tokens read nothing


def test_every_term_is_in_the_total() -> None:
    cost = StepCostModel(FACTS, DEVICE, tensor_parallel_size=2).predict(FULL_1, [1], [9], 1)
    seconds = [
        field.name
        for field in msgspec.structs.fields(cost)
        if isinstance(getattr(cost, field.name), float)
    ]
    assert cost.total == pytest.approx(sum(getattr(cost, name) for name in seconds))


def test_tensor_parallel_group() -> None:
    """Two devices read half each, and sum 8 activations twice in each layer."""
    alone = StepCostModel(FACTS, DEVICE).predict(FULL_1, [1], [9], 1)
    pair = StepCostModel(FACTS, DEVICE, tensor_parallel_size=2).predict(FULL_1, [1], [9], 1)
    assert pair.weights == pytest.approx(alone.weights / 2)
    # The only KV head is read by both.
    assert pair.attention == pytest.approx(alone.attention)
    assert pair.communication == pytest.approx(4 * (8 * 2 * 2 * 0.5 / 100 + 0.5))


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_visible_pairs_counts_what_a_loop_counts(window: int | None) -> None:
    for computed in range(6):
        for scheduled in range(1, 6):
            keys = [computed + i + 1 for i in range(scheduled)]
            expected = sum(n if window is None else min(n, window) for n in keys)
            found = visible_pairs(np.array([computed]), np.array([scheduled]), window)
            assert found.tolist() == [expected]


def test_sliding_windows_bound_what_is_read() -> None:
    windowed = msgspec.structs.replace(
        TINY, layers=(LayerConfig(rope=ROPE), LayerConfig(rope=ROPE, sliding_window=4))
    )
    facts = msgspec.structs.replace(FACTS, config=windowed)
    cost = StepCostModel(facts, DEVICE).predict(FULL_1, [1], [9], num_logits=1)
    assert cost.kv_bytes == 16 * (10 + 4 + 2)
    assert cost.attention_flops == 32 * (10 + 4)


def test_experts_that_no_token_chose_are_not_read() -> None:
    experts = msgspec.structs.replace(
        TINY,
        architecture="qwen3_moe",
        layers=(LayerConfig(rope=ROPE, is_moe=True),),
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=5,
    )
    facts = msgspec.structs.replace(FACTS, config=experts)
    router, expert = 8 * 4, 3 * 8 * 5
    assert facts.layer_params(None) == 192 + router + 4 * expert
    assert facts.layer_flops_per_token == 2 * (192 + router + 2 * expert)
    assert facts.streamed_layer_bytes(1) == 2 * (192 + router + 2 * expert)
    assert facts.streamed_layer_bytes(2) == 2 * (192 + router + 3 * expert)  # 4 * (1 - 1/4)
    assert facts.streamed_layer_bytes(1000) == 2 * (192 + router + 4 * expert)


def test_quantised_weights_are_smaller_and_multiplied_in_int8() -> None:
    facts = load_model_facts("llama-3.1-8b", dtype="q8_0")
    matrices = facts.num_params - facts.norm_params
    assert facts.weight_bytes == matrices * 34 // 32 + 2 * facts.norm_params
    assert facts.compute_dtype == "int8"


def test_arithmetic_that_a_device_does_not_have() -> None:
    facts = load_model_facts("llama-3.1-8b", dtype="fp8")
    with pytest.raises(UsageError, match=r"A100 40 GiB has no fp8 arithmetic: choose bf16"):
        StepCostModel(facts, DEVICES["a100-40"])
    with pytest.raises(UsageError, match="unknown number type 'int3'"):
        load_model_facts("llama-3.1-8b", dtype="int3")


def test_devices_by_name() -> None:
    assert find_device("H100") is H100
    with pytest.raises(UsageError, match=r"unknown device 'tpu': one of h100, .*l4 \(or cpu\)"):
        find_device("tpu")


def test_a_measured_cpu_reaches_what_was_measured() -> None:
    cpu = cpu_device(
        name="here", memory_bandwidth=1e10, memory_bytes=1 << 34, peak_flops={"int8": 3e11}
    )
    assert (cpu.bandwidth, cpu.flops("int8")) == (1e10, 3e11)
    assert (cpu.graph_mode, cpu.max_capture_size) == (GraphMode.FULL, None)
    assert L4.bandwidth < L4.memory_bandwidth  # a data sheet's is not
