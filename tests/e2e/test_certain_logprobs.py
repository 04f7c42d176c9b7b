"""``logprob_token_ids``: log-probabilities of certain tokens, through a whole engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny_models import tiny_gguf

from twostep import LLM, SamplingParams

pytestmark = pytest.mark.native


def test_they_are_those_that_the_likeliest_have(tmp_path: Path) -> None:
    """Whatever runs beside; and the text is the same, asked for them or not."""
    model = tiny_gguf(tmp_path, "llama", "Q8_0")
    common = {"temperature": 1.2, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    with LLM(model, max_model_len=128, threads=1) as llm:
        [plain] = llm.generate("Once", SamplingParams(logprobs=20, **common), use_tqdm=False)
        likely = plain.outputs[0].logprobs
        assert likely is not None
        ids = [*list(likely[0])[3:9], *list(likely[4])[2:5]]
        certain = SamplingParams(logprob_token_ids=ids, **common)
        other = SamplingParams(logprobs=2, **common)
        found, beside = llm.generate(["Once", "The"], [certain, other], use_tqdm=False)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    told = found.outputs[0].logprobs
    assert told is not None
    compared = 0
    for token_id, top, entry in zip(plain.outputs[0].token_ids, likely, told, strict=True):
        assert set(entry) == {token_id, *ids}
        assert entry[token_id] == top[token_id], "the chosen token's, with its rank"
        for other_id in set(ids) & set(top) - {token_id}:
            assert entry[other_id].logprob == top[other_id].logprob
            assert entry[other_id].rank is None
            compared += 1
    assert compared >= 9
    assert beside.outputs[0].logprobs is not None
    assert all(len(entry) in (2, 3) for entry in beside.outputs[0].logprobs)
