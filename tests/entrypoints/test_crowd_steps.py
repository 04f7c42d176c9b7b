"""How large a step of a crowd may be: a matter of the model, the threads, and what was asked."""

from __future__ import annotations

import pytest

from twostep.config.engine import SchedulerConfig
from twostep.config.model import LayerConfig, ModelConfig
from twostep.entrypoints.build import _size, crowd_step_tokens
from twostep.entrypoints.engine_options import EngineOptions

SMALL = (30, 576, 1536, 9, 3)  # SmolLM2-135M: 106 million multiplications a token in its layers
BILLION = (16, 2048, 8192, 32, 8)  # Llama 3.2 1B: 973 million
DEFAULTS = EngineOptions()


def config(
    num_layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int
) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        layers=(LayerConfig(rope=None),) * num_layers,
        max_position=2048,
    )


def test_it_is_a_quarter_of_a_second_of_multiplications() -> None:
    small = config(*SMALL)
    assert crowd_step_tokens(small, 2) == pytest.approx(2 * 5.5e10 / 106.2e6, rel=0.01)
    assert crowd_step_tokens(small, 4) == pytest.approx(2 * crowd_step_tokens(small, 2), abs=1)
    assert crowd_step_tokens(config(*BILLION), 2) == 113


def sized(
    shape: tuple[int, int, int, int, int], options: EngineOptions = DEFAULTS
) -> SchedulerConfig:
    return _size(config(*shape), options, "bf16", None, 2)[0]


def test_only_small_models_have_larger_steps_for_a_crowd() -> None:
    small, billion = sized(SMALL), sized(BILLION)
    assert (small.max_num_batched_tokens, small.crowd_step_tokens) == (256, 1024)
    assert (billion.max_num_batched_tokens, billion.crowd_step_tokens) == (256, 0)
    assert (small.largest_step, billion.largest_step) == (1024, 256)


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(max_num_batched_tokens=256),
        EngineOptions(prefill_burst_tokens=0),
        EngineOptions(scheduling_policy="priority"),
    ],
)
def test_who_says_how_large_steps_are_or_has_no_crowds_gets_no_larger_ones(
    options: EngineOptions,
) -> None:
    assert sized(SMALL, options).largest_step == 256
