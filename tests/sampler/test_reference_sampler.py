"""The rules of the sampler, by examples worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from twostep.sampler.reference import (
    SampleError,
    probabilities,
    process_logits,
    sample_row,
    token_logprobs,
)
from twostep.sampler.row_params import RowParams

PROBS = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))


def params(**fields):
    return RowParams(**({"prompt_len": 1, "temperature": 1.0} | fields))


def f32(values):
    return np.array(values, dtype=np.float32)


def kept(logits, **fields):
    probs, _ = probabilities(process_logits(logits, params(**fields), [0]), params(**fields))
    assert probs.sum() == pytest.approx(1)
    return np.flatnonzero(probs).tolist()


def test_case_50_penalties():
    row = params(repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25)
    z = process_logits(f32([2, -1, 0.5]), row, [0, 1, 1])
    assert z.tolist() == [1.0, -3.25, 0.5]


def test_case_50_min_p_keeps_what_is_not_far_below_the_best():
    assert kept(PROBS, min_p=0.2) == [0, 1, 2]
    assert kept(PROBS, min_p=1.0) == [0]


def test_case_50_top_p_keeps_the_fewest_that_reach_it():
    assert kept(PROBS, top_p=0.7) == [0, 1]
    assert kept(PROBS, top_p=0.4) == [0]
    assert kept(PROBS, top_p=1e-9) == [0]
    assert kept(PROBS, top_p=0.9999) == [0, 1, 2, 3]


def test_top_p_among_equals_takes_the_lower_ids():
    assert kept(f32([0, 0, 0, 0]), top_p=0.5) == [0, 1]


def test_top_p_counts_what_top_k_left():
    # 0.5 and 0.3 remain: 0.625 of the mass and 0.375.
    assert kept(PROBS, top_k=2, top_p=0.6) == [0]


def test_top_k_keeps_ties():
    assert kept(f32([3, 2, 2, 1]), top_k=2) == [0, 1, 2]
    assert kept(f32([3, 2, 2, 1]), top_k=1) == [0]
    for off in (0, -1, 4, 100):
        assert kept(f32([3, 2, 2, 1]), top_k=off) == [0, 1, 2, 3]


@pytest.mark.parametrize(("position", "masked"), [(10, True), (11, True), (12, True), (13, False)])
def test_min_tokens_masks_eos_and_stop_ids(position, masked):
    # Rows with input position 9, 10, 11 are masked; that of 12 is free.
    row = params(prompt_len=10, min_tokens=3, stop_ids=[1, 2])
    z = process_logits(f32([0, 9, 8, 1]), row, [0] * position)
    assert np.isneginf(z).tolist() == [False, masked, masked, False]


def test_min_tokens_gives_way_where_only_stops_are_allowed():
    row = params(min_tokens=3, stop_ids=[1, 2])
    allowed = np.array([False, True, True, False])
    z = process_logits(f32([0, 9, 8, 1]), row, [0], allowed)
    assert z.tolist() == [-math.inf, 9, 8, -math.inf]


@pytest.mark.parametrize(
    ("history", "banned"),
    [
        ([0, 4, 5], [6, 7]),  # output 4 5: both "4 5 6" and the lone 7
        ([4, 5], [7]),  # the 4 belongs to the prompt
        ([0, 5], [7]),
        ([0, 4, 5, 4], [7]),
    ],
)
def test_bad_words(history, banned):
    z = process_logits(f32([0] * 8), params(bad_words=[[4, 5, 6], [7]]), history)
    assert np.flatnonzero(np.isneginf(z)).tolist() == banned


def test_bias_is_clamped_and_revives_no_masked_token():
    row = params(bias_ids=[0, 1, 2], bias_values=[500, -500, 50], allowed_ids=[0, 1])
    assert process_logits(f32([1, 1, 1]), row, [0]).tolist() == [101, -99, -math.inf]


def test_greedy_takes_the_lowest_of_equals():
    assert sample_row(f32([1, 3, 3]), params(temperature=0.0), [0]).token == 1
    assert sample_row(f32([1, 3, 3]), params(temperature=1e-6), [0]).token == 1


def test_the_draw_follows_the_seed_and_the_position():
    logits = np.zeros(1000, dtype=np.float32)
    draws = [sample_row(logits, params(seed=s), [0] * n).token for s in (1, 2) for n in (1, 2)]
    assert len(set(draws)) == 4
    assert draws == [
        sample_row(logits, params(seed=s), [0] * n).token for s in (1, 2) for n in (1, 2)
    ]


@pytest.mark.parametrize("bad", [[math.nan, 0], [math.inf, 0], [-math.inf, -math.inf]])
def test_broken_and_empty_rows(bad):
    with pytest.raises(SampleError):
        sample_row(f32(bad), params(), [0])


def test_logprobs():
    ids, values, rank = token_logprobs(PROBS, 2, 3)
    assert ids == [2, 0, 1, 2]
    assert np.exp(values) == pytest.approx([0.15, 0.5, 0.3, 0.15], rel=1e-5)
    assert rank == 3
    assert token_logprobs(f32([1, 2, 2]), 1, 2)[::2] == ([1, 1, 2], 2)
