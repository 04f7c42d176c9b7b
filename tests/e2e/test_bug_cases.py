"""Cases that broke other engines, on a whole engine with native kernels (see docs/cases.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import prompt as prompt_of
from helpers.tiny_models import tiny_gguf

from twostep import LLM, SamplingParams

pytestmark = [pytest.mark.native, pytest.mark.timeout(240)]

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model"), "llama", "Q4_0")


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, max_model_len=256, max_num_seqs=16, threads=1) as llm:
        yield llm


def ids(length: int, start: int = 0) -> list[int]:
    known = prompt_of("llama")
    return [known[(start + i) % len(known)] for i in range(length)]


def tokens(length: int, start: int = 0) -> dict[str, Any]:
    return {"prompt_token_ids": ids(length, start)}


@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK, 3 * BLOCK])
def test_b02_a_prompt_of_whole_blocks_twice(llm: LLM, length: int) -> None:
    """The last token alone is computed again, although the cache has all of them."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, second = (llm.generate([tokens(length)], params, use_tqdm=False)[0] for _ in range(2))
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == length - 1


@pytest.mark.parametrize("budget", [BLOCK, 256])
def test_b04_logprobs_of_a_prompt_that_is_cached(model: Path, budget: int) -> None:
    """Scores do not come out of the cache, which has none: they are computed, chunk by chunk."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(model, max_model_len=256, threads=1, max_num_batched_tokens=budget) as llm:
        first, second = (llm.generate([tokens(50)], params, use_tqdm=False)[0] for _ in range(2))
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 50
    assert first.prompt_logprobs[0] is None
    for token, entry in zip(ids(50)[1:], first.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert entry[token].logprob <= 0


def test_b07_sixteen_at_once_with_aborts_get_their_own_answers(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [f"Repeat the code word XK-{i}: " + f"XK-{i} " * (i % 4 + 1) for i in range(16)]
    alone = [llm.generate([each], params, use_tqdm=False)[0].outputs[0].text for each in prompts]
    for turn in range(4):
        victims = [llm.add_request(prompts[(turn + i) % 16], params) for i in range(3)]
        llm.abort(victims[0])
        streams = llm.generate(prompts, params, use_tqdm=False)
        for victim in victims[1:]:
            llm.abort(victim)
        assert [output.outputs[0].text for output in streams] == alone


def test_generate_beside_requests_that_were_added(llm: LLM) -> None:
    """Those that ended first were taken for its own, and its own were missing."""
    short = SamplingParams(temperature=0, max_tokens=1)
    llm.add_request("other", short)
    long = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(["a", "b"], long, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6]


def test_b10_equal_priorities_and_several_sequences(model: Path) -> None:
    with LLM(model, max_model_len=128, threads=1, scheduling_policy="priority") as llm:
        params = [
            SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
            for n in (3, 1, 3)
        ]
        outputs = llm.generate(["same"] * 3, params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [3, 1, 3]
    assert outputs[0].outputs[2].token_ids == outputs[2].outputs[2].token_ids


def test_b26_logprobs_are_the_models_whatever_is_sampled_with(llm: LLM) -> None:
    found = [
        llm.generate(
            [tokens(20)], SamplingParams(max_tokens=1, logprobs=3, **options), use_tqdm=False
        )[0].outputs[0]
        for options in (
            {"temperature": 0},
            {"temperature": 0.2, "top_k": 1, "seed": 1},
            {"temperature": 0, "presence_penalty": 1.0},
            {"temperature": 0, "repetition_penalty": 1.5},
        )
    ]
    best = found[0].logprobs[0]
    top = {token for token, entry in best.items() if entry.rank <= 3}
    assert len(top) == 3
    for other in found[1:]:
        for token in top:
            assert other.logprobs[0][token].logprob == best[token].logprob


def test_b33_a_seed_holds_beside_requests_without_one(llm: LLM) -> None:
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16, ignore_eos=True)
    free = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
    [alone] = llm.generate([tokens(20)], seeded, use_tqdm=False)
    for turn in range(5):
        prompts = [tokens(20, start) for start in (3, 5, 0, 9)]
        params = [free, free, seeded, free]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert outputs[2].outputs[0].token_ids == alone.outputs[0].token_ids, turn


@pytest.mark.parametrize("max_tokens", [500, None])
def test_b56_the_context_ends_the_answer(llm: LLM, max_tokens: int | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    [output] = llm.generate([tokens(230)], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 256 - 230
