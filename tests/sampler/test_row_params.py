from __future__ import annotations

import pytest

from twostep.contracts.plan import NewRequestData
from twostep.contracts.sampling import SamplingParams
from twostep.sampler.row_params import RowParams, row_params


def request(**params):
    return NewRequestData(
        request_id="r7",
        prompt_len=2,
        prefill_token_ids=[5, 6, 7],
        sampling_params=SamplingParams(**({"seed": 3} | params)),
        stop_token_ids=[2],
        block_ids=[1],
        num_computed_tokens=0,
        num_cached_tokens=0,
    )


def test_defaults():
    assert row_params(request(), 100) == RowParams(prompt_len=2, seed=3, temperature=1.0)


def test_every_field_arrives():
    row = row_params(
        request(
            temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
            presence_penalty=0.2, frequency_penalty=0.3, logit_bias={9: -1.5, 3: 2.0},
            allowed_token_ids=[3, 9], bad_words_token_ids=[[1], [2, 3]], min_tokens=4, logprobs=0,
            prompt_logprobs=5,
        ),
        100,
    )  # fmt: skip
    assert row == RowParams(
        prompt_len=2, seed=3, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, bias_ids=[9, 3],
        bias_values=[-1.5, 2.0], allowed_ids=[3, 9], bad_words=[[1], [2, 3]], stop_ids=[2],
        min_tokens=4, num_logprobs=0, num_prompt_logprobs=5,
    )  # fmt: skip


def test_all_logprobs_means_the_whole_vocabulary():
    row = row_params(request(logprobs=-1, prompt_logprobs=-1), 100)
    assert (row.num_logprobs, row.num_prompt_logprobs) == (100, 100)


def test_negative_seeds_wrap():
    assert row_params(request(seed=-1), 100).seed == 2**64 - 1


def test_a_request_without_a_seed_is_a_bug():
    with pytest.raises(ValueError, match="r7: no seed"):
        row_params(request(seed=None), 100)
