"""Structured output through a whole engine: the text keeps its constraint, whoever runs beside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.tiny_models import tiny_gguf
from structured_output.schemas import SCHEMAS

from twostep import LLM, SamplingParams, StructuredOutputsParams
from twostep.contracts.errors import InvalidRequestError
from twostep.entrypoints import catalogue, store

PROMPT = "Answer: "
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS: dict[str, StructuredOutputsParams] = {
    "json": StructuredOutputsParams(json=PERSON),
    "regex": StructuredOutputsParams(regex=r"\d{3}-[a-f]{2,4}"),
    "choice": StructuredOutputsParams(choice=("red", "green", "dark blue")),
    "lark": StructuredOutputsParams(grammar='start: "yes" | "no" " "? "sir"'),
}


def is_kept(kind: str, text: str) -> bool:
    match kind:
        case "json":
            jsonschema.validate(json.loads(text), PERSON)
            return True
        case "regex":
            return re.fullmatch(r"\d{3}-[a-f]{2,4}", text) is not None
        case "choice":
            return text in ("red", "green", "dark blue")
        case _:
            return text in ("yes", "nosir", "no sir")


def params(kind: str, **options: Any) -> SamplingParams:
    options = {"temperature": 1.5, "seed": 7, "max_tokens": 120, **options}
    return SamplingParams(structured_outputs=KINDS[kind], **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model"), "llama", "Q4_0")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, max_model_len=256, max_num_seqs=16, threads=1) as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"ignore_eos": True}, {"min_tokens": 64}, {"min_p": 0.5, "top_k": 3}],
    ids=str,
)
def test_every_kind_is_kept(llm: LLM, kind: str, options: dict[str, Any]) -> None:
    """And the grammar's end wins: nothing behind it, reason "stop"."""
    [output] = llm.generate([PROMPT], params(kind, **options), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert is_kept(kind, output.outputs[0].text), output.outputs[0].text


def test_the_stream_has_the_same_text(llm: LLM) -> None:
    [whole] = llm.generate([PROMPT], params("json"), use_tqdm=False)
    pieces = [output.outputs[0].text for output in llm.stream(PROMPT, params("json"))]
    assert "".join(pieces) == whole.outputs[0].text


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_the_same_alone_or_beside_strangers(tiny: Path, is_async: bool) -> None:
    options = {"max_model_len": 256, "max_num_seqs": 16, "threads": 1}
    wanted = [params(kind, logprobs=2, seed=i) for i, kind in enumerate([*KINDS, *KINDS])]
    with LLM(tiny, async_scheduling=False, **options) as llm:
        alone = [llm.generate([PROMPT], each, use_tqdm=False)[0] for each in wanted]
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=2)
    with LLM(tiny, async_scheduling=is_async, **options) as llm:
        [free_alone] = llm.generate(["Once"], free, use_tqdm=False)
        *together, free_beside = llm.generate(
            [*[PROMPT] * len(wanted), "Once"], [*wanted, free], use_tqdm=False
        )
    for before, after in zip([*alone, free_alone], [*together, free_beside], strict=True):
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert after.outputs[0].logprobs == before.outputs[0].logprobs


def test_an_aborted_request_leaves_the_others_alone(llm: LLM) -> None:
    """Its grammar may not even be compiled."""
    victim = llm.add_request(
        PROMPT,
        SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="q{1,99}")),
    )
    llm.abort(victim)
    [output] = llm.generate([PROMPT], params("choice"), use_tqdm=False)
    assert is_kept("choice", output.outputs[0].text)


def test_who_has_no_token_left_ends_alone(llm: LLM) -> None:
    """A grammar and ``allowed_token_ids`` that exclude each other."""
    hopeless = params("choice", allowed_token_ids=[llm.get_tokenizer().encode("z", False)[0]])
    bad, good = llm.generate([PROMPT] * 2, [hopeless, params("choice")], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "no token is left" in str(bad.outputs[0].stop_reason)
    assert good.outputs[0].finish_reason == "stop"
    assert is_kept("choice", good.outputs[0].text)


def test_bad_constraints_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="uniqueItems") as caught:
        llm.generate(
            [PROMPT] * 2,
            [
                params("choice"),
                SamplingParams(
                    structured_outputs=StructuredOutputsParams(json={"uniqueItems": True})
                ),
            ],
            use_tqdm=False,
        )
    assert caught.value.code == "invalid_schema"
    assert llm.generate([PROMPT], params("choice"), use_tqdm=False)[0].finished


def test_logprobs_are_those_before_the_mask(llm: LLM) -> None:
    """Like vLLM's raw log-probabilities: the chosen token's rank may be anything."""
    kept = params("regex", logprobs=1, temperature=0)
    [structured] = llm.generate([PROMPT], kept, use_tqdm=False)
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    [unmasked] = llm.generate([PROMPT], free, use_tqdm=False)
    first, best = structured.outputs[0].logprobs[0], unmasked.outputs[0].logprobs[0]
    [(top_id, top)] = [item for item in best.items() if item[1].rank == 1]
    assert first[top_id].logprob == top.logprob
    assert next(iter(first.values())).logprob <= top.logprob


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_real_model_fills_schemas() -> None:
    """A sample, greedy and hot: what ends is valid; what does not end says "length"."""
    entry = catalogue.find("smollm2-135m")
    assert entry is not None
    if not store.is_present(entry):
        pytest.skip("smollm2-135m is not on disk; `twostep pull smollm2-135m` fetches it")
    names = [*list(SCHEMAS)[::9], "whole: tree", "whole: tagged union"]
    requests = [
        (
            name,
            SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=100,
                structured_outputs=StructuredOutputsParams(json=SCHEMAS[name]),
            ),
        )
        for i, name in enumerate(names)
        for temperature in (0.0, 1.5)
    ]
    with LLM("smollm2-135m", max_model_len=256, max_num_seqs=32) as llm:
        outputs = llm.generate(
            ["JSON:\n"] * len(requests), [each for _, each in requests], use_tqdm=False
        )
    num_complete = 0
    for (name, _), output in zip(requests, outputs, strict=True):
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            jsonschema.validate(
                json.loads(completion.text),
                SCHEMAS[name],
                format_checker=jsonschema.FormatChecker(),
            )
            num_complete += 1
        else:
            assert completion.finish_reason == "length"
    assert num_complete > len(requests) * 0.8
