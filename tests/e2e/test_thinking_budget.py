"""A bound on reasoning through a whole engine: the tag is forced, whoever runs beside."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny_models import tiny_gguf

from twostep import LLM, SamplingParams, StructuredOutputsParams
from twostep.contracts.sampling import ThinkingBudget

pytestmark = pytest.mark.native

END = "</think>"


def test_the_budget_is_kept_and_nothing_else_changes(tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path, "llama", "Q8_0")
    common = {"temperature": 0.9, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    free = SamplingParams(**common)
    with LLM(model, max_model_len=128, max_num_seqs=4, threads=1) as llm:
        ids = tuple(llm.get_tokenizer().encode(END, False))

        def bounded(most: int) -> SamplingParams:
            thinking = ThinkingBudget(
                max_tokens=most, start="<think>", end=END, end_token_ids=ids, is_thinking=True
            )
            return SamplingParams(
                structured_outputs=StructuredOutputsParams(thinking=thinking), **common
            )

        [alone] = llm.generate("Once", free, use_tqdm=False)
        budgets = [0, 6, 30]
        *outputs, beside = llm.generate(
            ["Once"] * 4, [*map(bounded, budgets), free], use_tqdm=False
        )
        [enough] = llm.generate("Once", bounded(40), use_tqdm=False)
    plain = alone.outputs[0].token_ids
    assert beside.outputs[0].token_ids == plain
    assert enough.outputs[0].token_ids == plain, "who stays below the budget is left alone"
    for most, output in zip(budgets, outputs, strict=True):
        found = output.outputs[0].token_ids
        assert found[:most] == plain[:most]
        assert tuple(found[most : most + len(ids)]) == ids
        assert len(found) == 40
        assert output.outputs[0].finish_reason == "length"
