"""Ranges and limits of sampling parameters."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.sampling import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from twostep.frontend.sampling_checks import check_sampling_params

VOCAB = 1000
LIMITS = Limits()


def check(**fields: Any) -> SamplingParams:
    return check_sampling_params(SamplingParams(**fields), LIMITS, VOCAB)


GOOD: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 2),
    ("temperature", 2.0),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 9999999),
    ("min_p", 0.0),
    ("min_p", 1),
    ("presence_penalty", -2),
    ("frequency_penalty", 2),
    ("repetition_penalty", 1e-3),
    ("repetition_penalty", 50.0),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("seed", -1),
    ("n", 1),
    ("n", 128),
    ("max_tokens", 1),
    ("max_tokens", None),
    ("min_tokens", 16),
    ("logprobs", 0),
    ("logprobs", 20),
    ("prompt_logprobs", 0),
    ("stream_interval", 1),
    ("stop", ["a"] * 64),
    ("stop", "é" * 128),
    ("stop_token_ids", list(range(128))),
    ("stop_token_ids", [0, VOCAB - 1]),
    ("bad_words", ["a"] * 128),
    ("allowed_token_ids", [0]),
    ("logit_bias", {5: 100, 6: -100.0}),
    ("logit_bias", dict.fromkeys(range(300), 1.0)),
    ("priority", -5),
    ("repetition_detection", RepetitionDetectionParams(max_pattern_size=512, min_count=2)),
]

BAD: list[tuple[str, Any]] = [
    *[
        (name, value)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )
        for value in (math.nan, math.inf, -math.inf, 1e999, "1", None, True, 10**400)
    ],
    ("temperature", -1),
    ("temperature", 2.01),
    ("temperature", 5),
    ("top_p", 0),
    ("top_p", 2),
    ("top_p", -0.1),
    ("min_p", 2),
    ("min_p", -0.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", 100),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("seed", 2**63),
    ("seed", 1.0),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.5),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("prompt_logprobs", 21),
    ("stream_interval", 0),
    ("output_kind", 1),
    ("ignore_eos", 1),
    ("detokenize", "no"),
    ("skip_special_tokens", None),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", {"a"}),
    ("stop", "a\ud800"),
    ("stop", ["a"] * 65),
    ("stop", "a" * 257),
    ("stop", "é" * 129),
    ("stop", ["x" * 8] * 500_000),
    ("logprob_token_ids", [VOCAB]),
    ("logprob_token_ids", [-1]),
    ("logprob_token_ids", [True]),
    ("logprob_token_ids", 5),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", list(range(129))),
    ("stop_token_ids", 5),
    ("bad_words", ["a"] * 129),
    ("bad_words", ["a"] * 50_000),
    ("bad_words", [" "]),
    ("bad_words", [""]),
    ("bad_words", [7]),
    ("bad_words", ["\udc00"]),
    ("repetition_detection", 3),
    ("repetition_detection", RepetitionDetectionParams(max_pattern_size=0)),
    ("repetition_detection", RepetitionDetectionParams(max_pattern_size=513)),
    ("repetition_detection", RepetitionDetectionParams(max_pattern_size=3, min_count=1)),
    ("repetition_detection", RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=4)),
    ("repetition_detection", RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=0)),
    ("bad_words_token_ids", [[]]),
    ("bad_words_token_ids", [[VOCAB]]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB]),
    ("allowed_token_ids", [0] * 1025),
    ("logit_bias", {191222: -100}),
    ("logit_bias", {-1: 5}),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {5: 101}),
    ("logit_bias", {5: None}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {5: math.inf}),
    ("logit_bias", dict.fromkeys(range(301), 1.0)),
    ("logit_bias", [1]),
    ("priority", 2**63),
    ("structured_outputs", {"json": "{}"}),
    ("structured_outputs", StructuredOutputsParams()),
    ("structured_outputs", StructuredOutputsParams(regex="a", json_object=True)),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_b32_good_values(name: str, value: Any) -> None:
    check(**{name: value})


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:30])
def test_b15_b17_b24_b28_b31_b32_b34_bad_values(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(**{name: value})
    assert caught.value.param == name
    message = str(caught.value)
    assert name.split("_")[0] in message
    assert "\n" not in message
    assert len(message) < 300
    json.dumps({"error": {"message": message, "param": name}}, allow_nan=False)


def test_b28_the_offending_key_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="191222"):
        check(logit_bias={1: 0.5, 191222: -100})
    with pytest.raises(InvalidRequestError, match="token 5 is 101"):
        check(logit_bias={5: 101})


def test_b15_empty_stop_lists_are_absent() -> None:
    assert check(stop=[]).stop is None
    assert check(stop=None).stop is None
    assert check(stop="x").stop == ["x"]
    assert check(stop_token_ids=[]).stop_token_ids is None


def test_b35_n_zero_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequestError, match="n is 0"):
        check(n=0)


def test_greedy_and_several_sequences_exclude_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="temperature 0"):
        check(n=2, temperature=0.0)
    assert check(n=2, temperature=0.001).n == 2


def test_normal_form() -> None:
    greedy = check(temperature=0, top_p=0.5, top_k=7, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    assert type(check(top_p=1).top_p) is float
    assert check(temperature=0.001).temperature == 0.01
    assert check(temperature=0.01).temperature == 0.01
    assert check(top_k=-1).top_k == 0
    assert check(top_k=VOCAB).top_k == 0
    assert check(top_k=VOCAB - 1).top_k == VOCAB - 1
    assert check(stop_token_ids=[3, 3, 1]).stop_token_ids == [3, 1]


def test_the_callers_parameters_are_not_changed() -> None:
    params = SamplingParams(temperature=0, top_k=5, stop="x")
    check_sampling_params(params, LIMITS, VOCAB)
    assert (params.top_k, params.stop) == (5, "x")


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize"):
        check(stop="x", detokenize=False)


def test_logprob_token_ids_take_the_place_of_the_likeliest() -> None:
    params = check(logprob_token_ids=[5, 3, 5], logprobs=7)
    assert (params.logprob_token_ids, params.logprobs) == ([5, 3], 0)
    params = check(logprob_token_ids=[], logprobs=7)
    assert (params.logprob_token_ids, params.logprobs) == (None, 7)


def test_limits_can_be_moved() -> None:
    limits = Limits(max_logprobs=-1, max_stop_strings=1, max_n=2)
    params = SamplingParams(logprobs=-1)
    assert check_sampling_params(params, limits, VOCAB).logprobs == -1
    with pytest.raises(InvalidRequestError, match="max_stop_strings"):
        check_sampling_params(SamplingParams(stop=["a", "b"]), limits, VOCAB)
    with pytest.raises(InvalidRequestError, match="from 1 to 2"):
        check_sampling_params(SamplingParams(n=3), limits, VOCAB)


@pytest.mark.parametrize(
    ("name", "limit", "make"),
    [
        ("stop", "max_stop_strings", lambda n: ["a"] * n),
        ("stop", "max_stop_string_bytes", lambda n: "a" * n),
        ("stop_token_ids", "max_stop_token_ids", lambda n: list(range(n))),
        ("logprob_token_ids", "max_logprob_token_ids", lambda n: list(range(n))),
        ("bad_words", "max_bad_words", lambda n: ["a"] * n),
        ("allowed_token_ids", "max_allowed_token_ids", lambda n: [i % VOCAB for i in range(n)]),
        ("logit_bias", "max_logit_bias", lambda n: dict.fromkeys(range(n), 0.5)),
    ],
)
def test_each_limit_below_at_and_above(name: str, limit: str, make: Any) -> None:
    cap = getattr(LIMITS, limit)
    check(**{name: make(cap - 1)})
    check(**{name: make(cap)})
    with pytest.raises(InvalidRequestError, match=limit):
        check(**{name: make(cap + 1)})
