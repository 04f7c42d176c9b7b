"""Log-probabilities of sampled and of known tokens, and what a step may ask for."""

from __future__ import annotations

import numpy as np
import pytest

from twostep.sampler.reference import token_logprobs
from twostep.sampler.row_params import RowParams, stage_row

pytestmark = pytest.mark.native


def f32(values):
    return np.array(values, dtype=np.float32)


def check(result, logits, token, n):
    ids, values, rank = token_logprobs(logits, token, n)
    assert result[0].tolist() == ids
    assert result[1] == pytest.approx(values, abs=2e-6)
    assert result[2] == rank


@pytest.mark.parametrize("vocab", [3, 100, 5001])
@pytest.mark.parametrize("n", [0, 1, 20, 10**9])
def test_of_the_sampled_token(make_sampler, case, vocab, n):
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((4, vocab)) * 5).astype(np.float32)
    logits[1] = np.round(logits[1])  # ties
    logits[2, : vocab // 2] = -np.inf
    params = RowParams(prompt_len=1, seed=2, temperature=1.5, top_k=2, num_logprobs=n)
    sampled = make_sampler(vocab).run(logits, [case(params, [0])] * 4)
    for m, token in enumerate(sampled.tokens()):
        check(sampled.logprobs(m), logits[m], token, min(n, vocab))


def test_of_certain_tokens(make_sampler, case):
    """In the order in which they were asked for, the sampled one first; raw like all others."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((3, 5001)) * 5).astype(np.float32)
    logits[1, :2500] = -np.inf
    ids = [4999, 7, 0, 7, 5000]
    asked = RowParams(
        prompt_len=1, seed=2, temperature=0.7, num_logprobs=0, logprob_ids=ids, bias_ids=[7],
        bias_values=[9],
    )  # fmt: skip
    best = RowParams(prompt_len=1, seed=2, temperature=1.5, num_logprobs=2)
    sampled = make_sampler(5001).run(logits, [case(asked, [0]), case(asked, [0]), case(best, [0])])
    for m, token in enumerate(sampled.tokens()[:2]):
        _, everything, _ = token_logprobs(logits[m], 0, 5001)
        by_id = dict(zip(token_logprobs(logits[m], 0, 5001)[0][1:], everything[1:], strict=True))
        found, values, rank = sampled.logprobs(m)
        assert found.tolist() == [token, *ids]
        assert values == pytest.approx([by_id[i] for i in found.tolist()], abs=2e-6)
        assert rank == token_logprobs(logits[m], token, 0)[2]
    check(sampled.logprobs(2), logits[2], sampled.tokens()[2], 2)


def test_tokens_outside_the_vocabulary_are_refused(make_sampler, case):
    params = RowParams(prompt_len=1, num_logprobs=0, logprob_ids=[4])
    with pytest.raises(ValueError, match="logprob_token_ids: token id 4 is outside"):
        make_sampler(4).run(f32([[2, 0, 1, 1]]), [case(params, [0])])


def test_they_are_raw(make_sampler, case):
    """Neither bias nor temperature nor masks show in them."""
    params = RowParams(
        prompt_len=1, temperature=0.3, num_logprobs=2, bias_ids=[1], bias_values=[50],
        allowed_ids=[1],
    )  # fmt: skip
    logits = f32([[2, 0, 1, 1]])
    sampled = make_sampler(4).run(logits, [case(params, [0])])
    assert sampled.tokens() == [1]
    check(sampled.logprobs(0), logits[0], 1, 2)


def test_off_unless_asked_for(make_sampler, case):
    sampled = make_sampler(4).run(f32([[2, 0, 1, 1]]), [case(RowParams(prompt_len=1), [0])])
    assert sampled.logprobs(0) is None


def test_minus_zero_equals_zero(make_sampler, case):
    params = RowParams(prompt_len=1, num_logprobs=4)
    sampled = make_sampler(4).run(f32([[-0.0, 0.0, -1, 0.0]]), [case(params, [0])])
    ids, _, rank = sampled.logprobs(0)
    assert ids.tolist() == [0, 0, 1, 3, 2]
    assert rank == 3


def kinds_of(sampler, *names):
    step = sampler.native.SampleStep
    return np.array([getattr(step, name) for name in names], dtype=np.uint8)


@pytest.mark.parametrize("chunks", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_prompt_logprobs(make_sampler, case, chunks):
    """Every chunking scores the prompt alike; the last row is sampled."""
    rng = np.random.default_rng(23)
    vocab, prompt = 90, [3, 14, 15, 9, 26]
    logits = rng.standard_normal((5, vocab)).astype(np.float32)
    sampler = make_sampler(vocab, rows=8)
    params = RowParams(prompt_len=5, num_prompt_logprobs=3, num_logprobs=1)
    done, entries = 0, []
    for count in chunks:
        step = sampler.prefill(done + count, count, row=4)
        if done == 0:
            sampler.stage(step, 4, case(params, prompt))
        last = done + count == len(prompt)
        kinds = ["SCORE"] * count
        if last:
            kinds[-1] = "SAMPLE"
        sampled = sampler.native.SampleStep(step, kinds_of(sampler, *kinds))
        sampler.set_logits(logits[done : done + count])
        sampler.stream.wait(sampler.launch(step))
        entries += [sampled.logprobs(m) for m in range(count)]
        done += count
    for position in range(4):
        check(entries[position], logits[position], prompt[position + 1], 3)
    token = sampled.tokens()[-1]
    assert sampled.tokens()[:-1] == [-1] * (chunks[-1] - 1)
    assert token == int(np.argmax(logits[4]))
    check(entries[4], logits[4], token, 1)
    assert sampler.table.row(4, 6) == [*prompt, token]


def test_skipped_rows_touch_nothing(make_sampler, case):
    sampler = make_sampler(10, rows=2)
    step = sampler.prefill(2, 2)
    sampler.stage(step, 0, case(RowParams(prompt_len=4), [1, 2, 3, 4]))
    sampled = sampler.native.SampleStep(step, kinds_of(sampler, "SKIP", "SKIP"))
    sampler.set_logits(np.full((2, 10), np.nan, dtype=np.float32))
    sampler.stream.wait(sampler.launch(step))
    assert sampled.tokens() == [-1, -1]
    assert sampled.failed() == []
    assert sampler.table.row(0, 4) == [1, 2, 3, 4]


def test_a_broken_scored_row_is_reported(make_sampler, case):
    sampler = make_sampler(10, rows=2)
    step = sampler.prefill(2, 2)
    sampler.stage(step, 0, case(RowParams(prompt_len=4, num_prompt_logprobs=0), [1, 2, 3, 4]))
    sampled = sampler.native.SampleStep(step, kinds_of(sampler, "SCORE", "SCORE"))
    sampler.set_logits([np.zeros(10), np.full(10, np.nan)])
    sampler.stream.wait(sampler.launch(step))
    assert [m for m, _ in sampled.failed()] == [1]
    assert sampled.logprobs(0) is not None
    assert sampled.logprobs(1) is None


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["SAMPLE"], "one kind for each row"),
        (["SAMPLE", "SAMPLE"], "only a request's last row|sampled once"),
        (["SAMPLE", "SKIP"], "only a request's last row"),
    ],
)
def test_steps_that_make_no_sense(make_sampler, kinds, message):
    sampler = make_sampler(10, rows=2)
    step = sampler.prefill(4, 2)
    with pytest.raises(ValueError, match=message):
        sampler.native.SampleStep(step, kinds_of(sampler, *kinds))


def test_a_step_without_its_sample_step_is_refused(make_sampler):
    sampler = make_sampler(10, rows=2)
    with pytest.raises(ValueError, match="no SampleStep"):
        sampler.launch(sampler.prefill(1, 1))


def test_a_bitmask_of_the_wrong_width_is_refused(make_sampler):
    sampler = make_sampler(65, rows=2)
    step = sampler.prefill(1, 1)
    sampled = sampler.native.SampleStep(step)
    sampled.set_bitmask(np.array([0], dtype=np.int32), np.zeros((1, 2), dtype=np.int32))
    with pytest.raises(ValueError, match="not as wide"):
        sampler.launch(step)
    with pytest.raises(ValueError, match="no such row"):
        sampled.set_bitmask(np.array([1], dtype=np.int32), np.zeros((1, 3), dtype=np.int32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"allowed_ids": [10]}, "allowed_token_ids: token id 10 is outside the vocabulary of 10"),
        ({"bias_ids": [-1], "bias_values": [1.0]}, "logit_bias: token id -1"),
        ({"bias_ids": [1]}, "one value for each id"),
        ({"bad_words": [[]]}, "a word has no tokens"),
        ({"bad_words": [[1, 12]]}, "bad_words: token id 12"),
        ({"stop_ids": [10]}, "stop_token_ids"),
        ({"presence_penalty": 1.0}, "prompt: token id 77"),
    ],
)
def test_bad_parameters_name_themselves(make_sampler, fields, message):
    sampler = make_sampler(10, rows=2)
    step = sampler.prefill(1, 1)
    with pytest.raises(ValueError, match=message):
        stage_row(sampler.state, step, 0, [77], RowParams(prompt_len=1, **fields))


def test_no_such_row(make_sampler):
    sampler = make_sampler(10, rows=2)
    with pytest.raises(ValueError, match="no such row"):
        stage_row(sampler.state, sampler.prefill(1, 1), 2, [1], RowParams(prompt_len=1))
