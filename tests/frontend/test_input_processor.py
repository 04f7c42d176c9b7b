"""Requests on their way into the engine core."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.sampling import SamplingParams, StructuredOutputsParams
from twostep.engine.wire import AddRequest, Codec
from twostep.frontend.input_processor import InputProcessor
from twostep.frontend.tokenizer import Tokenizer

Make = Callable[..., InputProcessor]
PARAMS = SamplingParams(max_tokens=4)


def test_prompt_forms(make_inputs: Make, byte_level: Tokenizer) -> None:
    inputs = make_inputs()
    ids = byte_level.encode("hello world")
    for prompt in ("hello world", {"prompt": "hello world"}):
        request = inputs.process("r", prompt, PARAMS)
        assert request.prompt == "hello world"
        assert request.prompt_token_ids == ids
    for given in (ids, tuple(ids), {"prompt_token_ids": ids}):
        request = inputs.process("r", given, PARAMS)
        assert request.prompt is None
        assert request.prompt_token_ids == ids
    both = inputs.process("r", {"prompt_token_ids": ids, "prompt": "shown"}, PARAMS)
    assert (both.prompt, both.prompt_token_ids) == ("shown", ids)


def test_core_request(make_inputs: Make) -> None:
    params = SamplingParams(temperature=0.5, max_tokens=4)
    prompt = {"prompt": "hello", "cache_salt": "tenant"}
    (core,) = make_inputs().process("r", prompt, params, client_index=3).core_requests
    assert core.request_id == "r-abc"
    assert core.arrival_time == 12.5
    assert core.client_index == 3
    assert core.cache_salt == "tenant"
    assert core.eos_token_id == 2
    assert core.sampling_params.stop_token_ids == [0]  # the model's other end of turn
    assert core.sampling_params.seed == 1000
    assert params.seed is None


def test_without_parameters_the_defaults_are_used(make_inputs: Make) -> None:
    defaults = SamplingParams(temperature=0.7, max_tokens=3)
    inputs = make_inputs(default_sampling_params=defaults)
    assert inputs.process("r", "hello").params.temperature == 0.7
    inputs.default_sampling_params().temperature = 0.1
    assert inputs.process("r", "hello").params.temperature == 0.7


def test_case_60_children(make_inputs: Make) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=4)
    request = make_inputs().process("r", "hello", params)
    assert [c.request_id for c in request.core_requests] == ["0_r-abc", "1_r-abc", "2_r-abc"]
    assert [c.sampling_params.seed for c in request.core_requests] == [7, 8, 9]
    assert [c.sampling_params.n for c in request.core_requests] == [1, 1, 1]
    assert request.params.n == 3


def test_children_seeds_wrap_and_unseeded_ones_differ(make_inputs: Make) -> None:
    params = SamplingParams(n=2, seed=2**63 - 1, max_tokens=4)
    request = make_inputs().process("r", "hello", params)
    assert [c.sampling_params.seed for c in request.core_requests] == [2**63 - 1, -(2**63)]
    inputs = make_inputs()
    params = SamplingParams(n=2, max_tokens=4)
    seeds = {
        core.sampling_params.seed
        for name in "ab"
        for core in inputs.process(name, "hello", params).core_requests
    }
    assert len(seeds) == 3  # 1000, 1001 and 1001, 1002: the source here counts by one


@pytest.mark.parametrize(("length", "fits"), [(63, True), (64, False), (65, False)])
def test_case_61_b36_prompt_length(make_inputs: Make, length: int, fits: bool) -> None:
    inputs = make_inputs()
    params = SamplingParams(max_tokens=None)
    if fits:
        request = inputs.process("r", [5] * length, params)
        assert request.core_requests[0].sampling_params.max_tokens == 1
    else:
        words = f"context length is 64 tokens. However, your prompt contains {length} input"
        with pytest.raises(InvalidRequestError, match=words) as caught:
            inputs.process("r", [5] * length, params)
        assert caught.value.code == "context_length_exceeded"


def test_case_61_max_tokens_default_is_the_room_left(make_inputs: Make) -> None:
    request = make_inputs().process("r", [5] * 10, SamplingParams(max_tokens=None))
    assert request.core_requests[0].sampling_params.max_tokens == 54


def test_b36_max_tokens_beyond_the_room(make_inputs: Make) -> None:
    params = SamplingParams(max_tokens=10)
    request = make_inputs().process("r", [5] * 60, params)
    assert request.core_requests[0].sampling_params.max_tokens == 4
    with pytest.raises(InvalidRequestError, match="ask for at most 4") as caught:
        make_inputs(reject_long_max_tokens=True).process("r", [5] * 60, params)
    assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequestError, match="room for 4"):
        make_inputs().process("r", [5] * 60, SamplingParams(max_tokens=10, min_tokens=5))


@pytest.mark.parametrize(
    "ids",
    [[-1], [5279552648203111001], [10**6], [1, "a"], [[1, 2], [3]], [[]], [True], [1.0], [None]],
)
def test_b29_bad_prompt_ids(make_inputs: Make, ids: Any) -> None:
    for prompt in (ids, {"prompt_token_ids": ids}):
        with pytest.raises(InvalidRequestError, match="no token id") as caught:
            make_inputs().process("r", prompt, PARAMS)
        assert caught.value.param == "prompt"


def test_b29_id_zero_is_a_prompt_and_padded_ids_are_not(
    make_inputs: Make, byte_level: Tokenizer
) -> None:
    assert make_inputs().process("r", [0], PARAMS).prompt_token_ids == [0]
    last = byte_level.vocab_size - 1
    make_inputs().process("r", [last], PARAMS)
    with pytest.raises(InvalidRequestError, match="no token id"):
        make_inputs().process("r", [last + 1], PARAMS)  # the embedding table has 4096 rows


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_b30_empty_prompt(make_inputs: Make, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        make_inputs().process("r", prompt, PARAMS)


def test_b30_empty_text_is_bos_where_the_model_has_one(
    make_inputs: Make, sentencepiece: Tokenizer
) -> None:
    assert make_inputs(sentencepiece).process("r", "", PARAMS).prompt_token_ids == [2]


@pytest.mark.parametrize("prompt", [{}, {"prompt": 3}, 5, None, b"x", {"text": "x"}])
def test_prompts_of_no_known_form(make_inputs: Make, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        make_inputs().process("r", prompt, PARAMS)


def test_an_endless_text_is_not_even_tokenised(make_inputs: Make) -> None:
    inputs = make_inputs(limits=Limits(max_prompt_chars_per_token=2))
    with pytest.raises(InvalidRequestError, match="129 characters"):
        inputs.process("r", "a" * 129, PARAMS)
    with pytest.raises(InvalidRequestError, match="128 input tokens"):
        inputs.process("r", "1" * 128, PARAMS)


@pytest.mark.parametrize("salt", ["", "x" * 129, "a\0b", 5])
def test_cache_salt(make_inputs: Make, salt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="1 to 128 characters"):
        make_inputs().process("r", {"prompt": "hello", "cache_salt": salt}, PARAMS)


def test_ignore_eos_takes_all_ends_of_the_model_away(make_inputs: Make) -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[9], max_tokens=4)
    (core,) = make_inputs().process("r", "hello", params).core_requests
    assert core.eos_token_id is None
    assert core.sampling_params.stop_token_ids == [9]


def test_b18_all_ends_of_the_model_reach_the_core(make_inputs: Make) -> None:
    inputs = make_inputs(eos_token_id=7, extra_eos_token_ids=[8, 7, 9, 8])
    params = SamplingParams(stop_token_ids=[5, 8], min_tokens=2, max_tokens=4)
    (core,) = inputs.process("r", "hello", params).core_requests
    assert core.eos_token_id == 7
    assert core.sampling_params.stop_token_ids == [5, 8, 9]


def test_b15_empty_stop_leaves_the_models_end(make_inputs: Make) -> None:
    (core,) = make_inputs().process("r", "hi", SamplingParams(stop=[], max_tokens=4)).core_requests
    assert core.eos_token_id == 2


def test_b16_stop_strings_that_are_special_tokens(make_inputs: Make) -> None:
    params = SamplingParams(stop=["<|im_end|>", "x"], ignore_eos=True, max_tokens=4)
    request = make_inputs().process("r", "hello", params)
    assert request.core_requests[0].sampling_params.stop_token_ids == [2]
    assert request.stop_texts == {2: "<|im_end|>"}


def test_bad_words_are_spelled_with_and_without_space(
    make_inputs: Make, byte_level: Tokenizer
) -> None:
    params = SamplingParams(bad_words=["hello", " world"], max_tokens=4)
    (core,) = make_inputs().process("r", "hi", params).core_requests
    words = core.sampling_params.bad_words_token_ids
    assert words is not None
    assert [byte_level.decode(ids) for ids in words] == ["hello", " hello", " world"]
    assert [len(ids) for ids in words] == [1, 1, 1]


def test_b34_bad_words_against_allowed_tokens(make_inputs: Make, byte_level: Tokenizer) -> None:
    inputs = make_inputs()
    (hello,) = byte_level.encode("hello")
    with pytest.raises(InvalidRequestError, match="forbids every token"):
        inputs.process("r", "hi", SamplingParams(allowed_token_ids=[hello], bad_words=["hello"]))
    inputs.process("r", "hi", SamplingParams(allowed_token_ids=[hello, 9], bad_words=["hello"]))
    inputs.process("r", "hi", SamplingParams(bad_words=["\0"]))


def test_bad_words_have_a_total(make_inputs: Make) -> None:
    inputs = make_inputs(limits=Limits(max_bad_words_tokens=10))
    with pytest.raises(InvalidRequestError, match="max_bad_words_tokens"):
        inputs.process("r", "hi", SamplingParams(bad_words=["qwertz"]))


def test_features_the_engine_lacks_are_refused(make_inputs: Make) -> None:
    structured = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidRequestError, match="no structured outputs"):
        make_inputs().process("r", "hi", structured)
    seen = []
    make_inputs(check_grammar=seen.append).process("r", "hi", structured)
    assert seen == [structured.structured_outputs]
    with pytest.raises(InvalidRequestError, match="--scheduling-policy priority"):
        make_inputs().process("r", "hi", PARAMS, priority=1)
    request = make_inputs(policy="priority").process("r", "hi", PARAMS, priority=-3)
    assert request.core_requests[0].priority == -3
    for priority in (True, 2**63, 1.5):
        with pytest.raises(InvalidRequestError, match="64 bits"):
            make_inputs(policy="priority").process("r", "hi", PARAMS, priority=priority)


def test_without_tokenizer(make_inputs: Make) -> None:
    inputs = make_inputs(None)
    request = inputs.process("r", [99], PARAMS)
    assert request.core_requests[0].eos_token_id is None
    with pytest.raises(InvalidRequestError, match="without a tokenizer"):
        inputs.process("r", "hello", PARAMS)
    for params in (SamplingParams(stop="x"), SamplingParams(bad_words=["x"])):
        with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
            inputs.process("r", [1], params)


def test_ids_and_seeds_are_random_by_default(byte_level: Tokenizer) -> None:
    inputs = InputProcessor(byte_level, 64, 4096)
    made = [inputs.process("r", "hello", PARAMS).core_requests[0] for _ in range(3)]
    assert len({core.request_id for core in made}) == 3
    assert len({core.sampling_params.seed for core in made}) == 3
    assert all(core.request_id.startswith("r-") for core in made)


def test_a_schema_goes_to_the_core_as_text_whatever_its_integers(make_inputs: Make) -> None:
    """Fuzz case 10372 of seed 1: an integer above 64 bits in a schema was a 500."""
    schema = {"$defs": {"x": [2**64]}, "type": "object"}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    processed = make_inputs(check_grammar=lambda params: None).process("r", "hi", params)
    [request] = processed.core_requests
    frame = Codec().encode(AddRequest(request))
    got = Codec().decode_client_message(frame)
    assert isinstance(got, AddRequest)
    sent = got.request.sampling_params.structured_outputs
    assert sent is not None
    assert isinstance(sent.json, str)
    assert json.loads(sent.json) == schema
    assert params.structured_outputs is not None
    assert params.structured_outputs.json is schema  # the caller's own stay as they are
