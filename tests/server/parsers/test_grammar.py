"""Grammars for demanded and strict calls, run by llguidance itself over a byte vocabulary."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from server.parsers.parse import function, parse, summary

from twostep.contracts.sampling import StructuredOutputsParams
from twostep.server.parsers.formats import Formats, ToolChoice, choose_formats
from twostep.server.parsers.grammar import output_grammar

EOS = 256
SPECIAL = {"[TOOL_CALLS]": 257, "[ARGS]": 258, "</think>": 259, "<think>": 260}


class _Bytes:
    """A vocabulary of single bytes, an end token and some special ones."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = [*(bytes([i]) for i in range(256)), b"<eos>", *(s.encode() for s in SPECIAL)]
    special_token_ids = [EOS, *SPECIAL.values()]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def allows(params: StructuredOutputsParams | None, text: str, *, special: bool = False) -> bool:
    """Whether a model may write exactly this text and end."""
    assert params is not None
    matcher = llguidance.LLMatcher(TOKENIZER, params.grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    if special:
        ids = []
        while text:
            found = next((s for s in SPECIAL if text.startswith(s)), None)
            ids += [SPECIAL[found]] if found else list(text[0].encode())
            text = text[len(found or text[0]) :]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


WEATHER = function("weather", city={"type": "string"}, days={"type": "integer", "minimum": 1})
WEATHER["function"]["parameters"] |= {"required": ["city"], "additionalProperties": False}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]

# How each form says: weather(city="Köln", days=3), ping(), and weather(town="x").
FORMS: dict[str, tuple[str, str, str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        "\n",
        '<tool_call>\n{"name": "weather", "arguments": {"town": "x"}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3"
        "\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
        "\n",
        "<tool_call>\n<function=weather>\n<parameter=town>\nx\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Köln", "days": 3}}',
        '{"name": "ping", "parameters": {}}',
        "; ",
        '{"name": "weather", "parameters": {"town": "x"}}',
    ),
    "mistral_args": (
        '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 3}',
        "[TOOL_CALLS]ping[ARGS]{}",
        "",
        '[TOOL_CALLS]weather[ARGS]{"town": "x"}',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]',
        '[TOOL_CALLS][{"name": "ping", "arguments": {}}]',
        "",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"town": "x"}}]',
    ),
    "json": (
        '[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]',
        '[{"name": "ping", "arguments": {}}]',
        "",
        '[{"name": "weather", "arguments": {"town": "x"}}]',
    ),
}


def formats_of(form: str, reasoning: str = "none") -> Formats:
    template = "[ARGS]" if form == "mistral_args" else None
    name = form.removesuffix("_args")
    return choose_formats(template, tool_call_parser=name, reasoning_parser=reasoning)


def grammar(form: str, choice: ToolChoice, **how: Any) -> StructuredOutputsParams | None:
    reasoning = how.pop("reasoning", "none")
    return output_grammar(formats_of(form, reasoning), how.pop("tools", TOOLS), choice, **how)


@pytest.mark.parametrize("form", FORMS)
def test_required_allows_calls_and_nothing_else(form: str) -> None:
    weather, ping, between, wrong = FORMS[form]
    params = grammar(form, "required")
    assert allows(params, weather)
    assert allows(params, ping)
    assert not allows(params, "")
    assert not allows(params, "I would rather talk")
    assert not allows(params, wrong)
    assert not allows(params, weather.replace("weather", "other"))
    assert not allows(params, weather.replace("3", "0")), "minimum is 1"
    if form not in ("mistral", "json"):  # those hold several calls in one array
        assert allows(params, weather + between + ping)
        alone = grammar(form, "required", parallel_tool_calls=False)
        assert allows(alone, weather)
        assert not allows(alone, weather + between + ping)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_grammar_allows_is_read_as_that_call(form: str) -> None:
    weather, ping, between, _ = FORMS[form]
    [(name, arguments)] = summary(parse([weather], form.removesuffix("_args"), tools=TOOLS))[2]
    assert name == "weather"
    assert json.loads(arguments) == {"city": "Köln", "days": 3}
    calls = summary(parse([weather + between + ping], form.removesuffix("_args"), tools=TOOLS))[2]
    if form not in ("json",):
        assert calls == [("weather", arguments), ("ping", "{}")]


@pytest.mark.parametrize("form", ["mistral", "json"])
def test_an_array_holds_several_calls(form: str) -> None:
    array = FORMS[form][0][:-1] + ', {"name": "ping", "arguments": {}}]'
    assert allows(grammar(form, "required"), array)
    assert not allows(grammar(form, "required", parallel_tool_calls=False), array)


@pytest.mark.parametrize("form", FORMS)
def test_a_named_choice_allows_one_call_of_that_function(form: str) -> None:
    weather, ping, between, _ = FORMS[form]
    params = grammar(form, {"type": "function", "function": {"name": "ping"}})
    assert allows(params, ping)
    assert not allows(params, weather)
    assert not allows(params, ping + between + ping)


@pytest.mark.parametrize("form", FORMS)
def test_auto_is_free_unless_a_function_is_strict(form: str) -> None:
    assert grammar(form, "auto") is None
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    params = grammar(form, "auto", tools=[strict, PING])
    weather, ping, between, wrong = FORMS[form]
    assert allows(params, "")
    assert allows(params, "Just talk { < [TOOL")
    assert allows(params, weather)
    assert not allows(params, wrong)
    if form not in ("json", "llama3_json"):
        assert allows(params, "Let me see.\n" + weather)
        assert not allows(params, "Let me see.\n" + wrong)
        assert allows(params, weather + "\n" + ping)


def test_none_and_no_tools_constrain_nothing() -> None:
    assert grammar("hermes", "none") is None
    assert grammar("hermes", "required", tools=[]) is None


def test_reasoning_before_demanded_calls_is_free() -> None:
    ping = FORMS["hermes"][1]
    opened = grammar("hermes", "required", reasoning="think", starts_in_reasoning=True)
    assert allows(opened, "I should <tool_call> {x}\n</think>\n\n" + ping)
    assert not allows(opened, ping)
    closed = grammar("hermes", "required", reasoning="think")
    assert allows(closed, "<think>\nhm\n</think>\n\n" + ping)
    assert allows(closed, ping)
    assert not allows(closed, "hm </think>" + ping)


def test_markers_that_are_special_tokens_are_those_tokens() -> None:
    weather, ping, _, wrong = FORMS["mistral_args"]
    params = grammar("mistral_args", "required", special_tokens=SPECIAL)
    assert allows(params, weather + ping, special=True)
    assert not allows(params, weather)
    assert not allows(params, wrong, special=True)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    auto = grammar("mistral_args", "auto", tools=[strict], special_tokens=SPECIAL)
    assert allows(auto, "Well. " + weather, special=True)
    assert not allows(auto, "Well. " + wrong, special=True)
    thought = grammar(
        "hermes",
        "required",
        reasoning="think",
        starts_in_reasoning=True,
        special_tokens=SPECIAL,
    )
    assert allows(thought, "hm</think>\n" + FORMS["hermes"][1], special=True)


def test_a_schema_with_keywords_that_cannot_be_kept() -> None:
    odd = function("odd", x={"type": "array", "uniqueItems": True})
    assert allows(
        grammar("hermes", "required", tools=[odd]),
        '<tool_call>\n{"name": "odd", "arguments": {"x": [1, 1]}}\n</tool_call>',
    )
    odd["function"]["strict"] = True
    params = grammar("hermes", "required", tools=[odd])
    assert params is not None
    matcher = llguidance.LLMatcher(TOKENIZER, params.grammar)
    assert "uniqueItems" in matcher.get_error()


def test_tagged_values_follow_their_types() -> None:
    tool = function(
        "f",
        kind={"type": "string", "enum": ["a", "b"]},
        point={"$ref": "#/$defs/P"},
        maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
    )
    tool["function"]["parameters"] |= {
        "required": ["kind", "point", "maybe"],
        "$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
    params = grammar("qwen3_coder", "required", tools=[tool])
    text = (
        "<tool_call>\n<function=f>\n<parameter=kind>\n{}\n</parameter>\n<parameter=point>\n{}\n"
        "</parameter>\n<parameter=maybe>\n{}\n</parameter>\n</function>\n</tool_call>"
    )
    assert allows(params, text.format("a", '{"x": 1}', "any <b>\nthing"))
    assert not allows(params, text.format("c", '{"x": 1}', ""))
    assert not allows(params, text.format("a", '{"x": "1"}', ""))


ANSWERS = [
    (StructuredOutputsParams(choice=("yes", 'n"o')), 'n"o', "maybe"),
    (StructuredOutputsParams(regex="[a-c]+/x"), "abc/x", "abd/x"),
    (StructuredOutputsParams(json={"type": "integer"}), "12", "x"),
    (StructuredOutputsParams(json='{"type": "integer"}'), "12", "x"),
    (StructuredOutputsParams(json_object=True), '{"a":1}', "[1]"),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), ANSWERS)
def test_a_constraint_on_the_answer_holds_after_reasoning(
    answer: StructuredOutputsParams, right: str, wrong: str
) -> None:
    think = choose_formats(None, reasoning_parser="think")
    params = output_grammar(think, [], "none", answer, starts_in_reasoning=True)
    assert allows(params, "x {\n</think>\n\n" + right)
    assert not allows(params, "x</think>" + wrong)
    assert not allows(params, right)
    closed = output_grammar(think, [], "none", answer)
    assert allows(closed, right)
    assert allows(closed, "<think>x</think>" + right)
    assert output_grammar(choose_formats(None), [], "none", answer) == answer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("answer", "right", "wrong"), ANSWERS)
def test_with_auto_the_model_calls_or_answers_as_it_must(
    form: str, answer: StructuredOutputsParams, right: str, wrong: str
) -> None:
    weather, _, _, wrong_call = FORMS[form]
    tag = "<|python_tag|>" if form == "llama3_json" else ""
    params = grammar(form, "auto", answer=answer)
    assert allows(params, right)
    assert allows(params, tag + weather)
    assert not allows(params, wrong)
    assert not allows(params, tag + wrong_call)


def test_demanded_calls_come_before_a_constraint_on_the_answer() -> None:
    answer = StructuredOutputsParams(json={"type": "integer"})
    params = grammar("hermes", "required", answer=answer)
    assert allows(params, FORMS["hermes"][1])
    assert not allows(params, "12")


def test_a_grammar_of_the_users_own_is_left_alone() -> None:
    own = StructuredOutputsParams(grammar='start: "x"')
    assert grammar("hermes", "auto", answer=own, reasoning="think") == own
