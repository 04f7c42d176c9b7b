"""The forward pass as one plan, cut at attention, and op by op: the same bytes, by the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import tiny_gguf, tiny_hf_dir
from helpers.tiny_text import VOCAB_SIZE

from twostep import LLM, SamplingParams
from twostep.runner.graphs import BatchDescriptor, GraphDispatcher, GraphMode

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama Q4_0": lambda folder: tiny_gguf(folder, "llama", "Q4_0"),
    "qwen3_moe fp32": lambda folder: tiny_hf_dir(folder, "qwen3_moe", dtype="F32"),
}
PROMPTS = [
    {"prompt_token_ids": [5 + (7 * i * i + 3 * i + n) % (VOCAB_SIZE - 5) for i in range(length)]}
    for n, length in enumerate([61, 3, 40, 17])
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=4, max_tokens=12, logprobs=3, prompt_logprobs=1),
]


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


def runner_of(llm: LLM) -> Any:
    return llm._client.engine_core.executor.runner  # type: ignore[attr-defined]


def answers(model: Path, mode: GraphMode, **options: Any) -> list[Any]:
    """Tokens, log-probabilities and prompt log-probabilities of a few requests in chunks of 32."""
    options = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32, **options}
    with LLM(model, **options) as llm:
        runner = runner_of(llm)
        if mode is GraphMode.PIECEWISE:
            runner.graphs = GraphDispatcher(mode, capture_sizes=None, max_num_seqs=8)
        outputs = [
            output for params in PARAMS for output in llm.generate(PROMPTS, params, use_tqdm=False)
        ]
        assert runner.last_graph.mode is mode
        assert set(runner._forward_plans) == {GraphMode.FULL, mode}
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
        for output in outputs
    ]


def test_same_bytes(model: Path) -> None:
    whole = answers(model, GraphMode.FULL)
    assert answers(model, GraphMode.PIECEWISE) == whole
    assert answers(model, GraphMode.NONE, enforce_eager=True) == whole
    assert answers(model, GraphMode.NONE, enforce_eager=True, threads=1) == whole


def test_cuts(model: Path) -> None:
    """Every op once and in order, attention on its own; the last layer's is with the logits."""
    with LLM(model, max_model_len=128, max_num_seqs=2) as llm:
        cpu_model = runner_of(llm)._model
        names = cpu_model.forward_plan.op_names()
        ops = [part.op_names() for part in cpu_model.forward_ops()]
        pieces = [part.op_names() for part in cpu_model.forward_pieces()]
        num_layers = llm._engine.config.num_layers
        behind = cpu_model.logits_plan.op_names()
    assert ops == [[name] for name in names]
    assert [name for piece in pieces for name in piece] == names
    assert len(pieces) == 2 * num_layers - 1
    assert behind[:2] == ["gather", "attention"]
    for number, piece in enumerate(pieces):
        assert {name.startswith("attention") for name in piece} == {number % 2 == 1}


def test_any_number_of_tokens_is_replayed_without_padding(model: Path) -> None:
    with LLM(model, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64) as llm:
        params = SamplingParams(max_tokens=1)
        llm.generate(PROMPTS[0], params, use_tqdm=False)
        assert runner_of(llm).last_graph == BatchDescriptor(GraphMode.FULL, 61, 1)
