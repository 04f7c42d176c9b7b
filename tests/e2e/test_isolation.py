"""One request's bad numbers end that request; the others do not change by a bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_models import config_json, tiny_hf_dir, tiny_weights, write_safetensors

from twostep import LLM, SamplingParams
from twostep.ops.protocol import RawTensor

POISON = 77
"""A token whose embedding overflows float32 once Gemma scales it: its rows become NaN."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_hf_dir(tmp_path_factory.mktemp("poisoned"), "gemma3", dtype="F32")
    weights = tiny_weights("gemma3")
    # One coordinate, so that the token's own logit (tied weights) is at most infinite, never NaN.
    weights["model.embed_tokens.weight"][POISON] = 0.0
    weights["model.embed_tokens.weight"][POISON, 0] = 3e38
    assert config_json("gemma3")["hidden_size"] ** 0.5 > 2
    raws = {
        name: RawTensor(
            name=name,
            format="F32",
            shape=values.shape,
            data=np.ascontiguousarray(values, dtype=np.float32).view(np.uint8).reshape(-1),
        )
        for name, values in weights.items()
    }
    write_safetensors(folder / "model.safetensors", raws)
    return folder


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_nan_logits_end_their_own_request_only(poisoned: Path, is_async: bool) -> None:
    good = [{"prompt_token_ids": list(range(5 + i, 45 + i))} for i in range(6)]
    bad = {"prompt_token_ids": [*range(10, 30), POISON, *range(30, 40)]}
    params = SamplingParams(
        temperature=0, max_tokens=20, logprobs=1, ignore_eos=True, logit_bias={POISON: -100}
    )
    options = {"async_scheduling": is_async, "max_model_len": 128, "max_num_seqs": 8}
    with LLM(poisoned, **options) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in good]
    with LLM(poisoned, **options) as llm:
        together = llm.generate([*good[:3], bad, *good[3:]], params, use_tqdm=False)
        failed = together.pop(3).outputs[0]
        assert failed.finish_reason == "error"
        assert "NaN" in str(failed.stop_reason) or "nan" in str(failed.stop_reason).lower()
        for before, after in zip(alone, together, strict=True):
            assert after.outputs[0].finish_reason == "length"
            assert after.outputs[0].token_ids == before.outputs[0].token_ids
            assert after.outputs[0].logprobs == before.outputs[0].logprobs
        # Blocks that hold the failed request's NaN are used again by later ones.
        again = llm.generate(good, params, use_tqdm=False)
        for before, after in zip(alone, again, strict=True):
            assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_llm_refuses_what_it_cannot_do_and_goes_on(poisoned: Path) -> None:
    from twostep.contracts.errors import EngineDeadError, InvalidRequestError

    llm = LLM(poisoned, max_model_len=64, max_num_seqs=2)
    for prompt in ([], [10**9], list(range(5, 70))):
        with pytest.raises(InvalidRequestError):
            llm.generate([{"prompt_token_ids": prompt}, {"prompt_token_ids": [5]}], use_tqdm=False)
    assert not llm.has_unfinished_requests()
    stream = llm.stream({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=50))
    next(stream)
    stream.close()
    while llm.has_unfinished_requests():
        assert llm.step() == []
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x", use_tqdm=False)
