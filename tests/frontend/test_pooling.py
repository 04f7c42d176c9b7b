"""Embedding requests in the front end: checks, the core's view of them, vectors, figures."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.outputs import EngineCoreOutput, PrefillStats
from twostep.contracts.pooling import Pooler, PoolingParams
from twostep.contracts.request import FinishReason
from twostep.contracts.sampling import SamplingParams
from twostep.contracts.stats import IterationStats
from twostep.frontend.embedding import finish_embedding
from twostep.frontend.input_processor import InputProcessor
from twostep.frontend.output_processor import OutputProcessor

Make = Callable[..., InputProcessor]
MEAN = Pooler(kind="mean", normalize=True, size=8)
RAW = PoolingParams(normalize=False)
VECTOR = array("f", [3.0, -4.0, 12.0, 0.1])


def test_the_core_sees_a_request_of_one_token(make_inputs: Make) -> None:
    request = make_inputs(pooler=MEAN).process("r", "hello", PoolingParams())
    [core] = request.core_requests
    assert core.request_id == "r-abc"
    assert core.sampling_params.max_tokens == 1
    assert core.eos_token_id == 0, "the token that stands for the vector ends it as a stop does"
    assert request.pooling == PoolingParams(normalize=True)


def test_a_text_may_fill_the_whole_context(make_inputs: Make) -> None:
    inputs = make_inputs(pooler=MEAN)
    longest = inputs.max_model_len
    inputs.process("r", [7] * longest, PoolingParams())
    with pytest.raises(
        InvalidRequestError, match=f"is {longest} tokens.*has {longest + 1}"
    ) as long:
        inputs.process("r", [7] * (longest + 1), PoolingParams())
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("prompt", ["", [], {"prompt_token_ids": []}, {"prompt": ""}])
def test_an_empty_text_is_refused(prompt: Any, make_inputs: Make) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        make_inputs(pooler=MEAN).process("r", prompt, PoolingParams())


def test_each_kind_of_engine_refuses_the_other_kind_of_request(make_inputs: Make) -> None:
    for pooler, params in ((None, PoolingParams()), (MEAN, SamplingParams()), (MEAN, None)):
        with pytest.raises(InvalidRequestError) as refused:
            make_inputs(pooler=pooler).process("r", "hello", params)
        assert (refused.value.param, refused.value.code) == ("model", "unsupported_feature")


@pytest.mark.parametrize(
    ("pooler", "params", "param"),
    [
        (MEAN, PoolingParams(dimensions=4), "dimensions"),
        (MEAN, PoolingParams(dimensions=8), "dimensions"),
        (Pooler(kind="cls", normalize=True, size=8, is_matryoshka=True), {"dimensions": 9}, None),
        (Pooler(kind="cls", normalize=True, size=8, is_matryoshka=True), {"dimensions": 0}, None),
        (
            Pooler(kind="cls", normalize=True, size=8, is_matryoshka=True, dimensions=(2, 4)),
            {"dimensions": 3},
            None,
        ),
        (MEAN, PoolingParams(normalize="yes"), "normalize"),
        (MEAN, PoolingParams(priority=1), "priority"),  # the policy is fcfs
    ],
)
def test_parameters_that_are_refused(
    pooler: Pooler, params: Any, param: str | None, make_inputs: Make
) -> None:
    if isinstance(params, dict):
        params = PoolingParams(**params)
    with pytest.raises(InvalidRequestError) as refused:
        make_inputs(pooler=pooler).process("r", "hello", params)
    assert refused.value.param == (param or "dimensions")


def test_vectors_are_cut_first_and_then_scaled() -> None:
    data = VECTOR.tobytes()
    assert finish_embedding(data, RAW) == VECTOR.tolist()
    assert (
        finish_embedding(data, PoolingParams(normalize=True, dimensions=2))
        == array("f", [0.6, -0.8]).tolist()
    )
    whole = finish_embedding(data, PoolingParams(normalize=True))
    assert math.isclose(math.hypot(*whole), 1.0, abs_tol=1e-7)
    zeros = array("f", [0.0] * 3)
    assert finish_embedding(zeros.tobytes(), PoolingParams(normalize=True)) == [0.0] * 3


def test_news_of_the_core_become_a_vector_and_figures(make_inputs: Make) -> None:
    now = iter([10.0, 12.5])
    outputs = OutputProcessor(None, clock=lambda: next(now))
    request = make_inputs(pooler=MEAN).process("r", [7, 8, 9], RAW)
    outputs.add_request(request)
    news = EngineCoreOutput(
        request_id="r-abc",
        new_token_ids=[0],
        finish_reason=FinishReason.STOP,
        prefill_stats=PrefillStats(
            num_prompt_tokens=3, num_cached_tokens=1, queued_ts=10.5, scheduled_ts=11.5
        ),
        pooled=VECTOR.tobytes(),
    )
    iteration = IterationStats(timestamp=0.0)
    done = outputs.process_outputs([news], iteration)
    [output] = done.request_outputs
    assert output.embedding == VECTOR.tolist()
    assert output.finished
    assert [(each.token_ids, each.text, each.finish_reason) for each in output.outputs] == [
        ([], "", "stop")
    ]
    assert (iteration.num_prompt_tokens, iteration.num_cached_tokens) == (3, 1)
    assert iteration.num_generation_tokens == 0
    assert iteration.time_to_first_tokens == []
    [figures] = done.finished
    assert (figures.num_generation_tokens, figures.max_tokens) == (0, 0)
    assert (figures.queued_time, figures.prefill_time, figures.decode_time) == (1.0, 1.0, 0.0)
    assert figures.e2e_latency == 2.5
