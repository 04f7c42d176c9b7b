"""What each form of calls is read as."""

from __future__ import annotations

import json
import re

import pytest
from server.parsers.parse import TOOLS, function, parse, summary

from twostep.server.parsers.events import Text, ToolArguments, ToolStart
from twostep.server.parsers.formats import choose_formats


def test_a_call_between_texts_hermes() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n'
    assert parse([text], "hermes") == [
        Text("Let me see."),
        ToolStart(0, "id0", "ping"),
        ToolArguments(0, "{}"),
    ]
    assert summary(parse([text + "Done."], "hermes"))[1] == "Let me see.\n\nDone."


@pytest.mark.parametrize("arguments", ["{bad json", '{"a": 1,}', "{'a': 1}", '{"a": tru}'])
def test_arguments_that_are_no_json_are_handed_on_b44(arguments: str) -> None:
    text = f'<tool_call>{{"name": "ping", "arguments": {arguments}</tool_call>'
    [(name, told)] = summary(parse([text], "hermes"))[2]
    assert (name, told) == ("ping", arguments)


def test_a_call_without_arguments_has_none() -> None:
    for text in ('{"name": "ping"}', '{"name": "ping", "arguments": null}'):
        [call] = summary(parse([f"<tool_call>{text}</tool_call>"], "hermes"))[2]
        assert call == ("ping", "{}")


def test_two_calls_have_indices_and_ids_of_their_own() -> None:
    call = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    starts = [e for e in parse([call + call], "hermes") if isinstance(e, ToolStart)]
    assert starts == [ToolStart(0, "id0", "ping"), ToolStart(1, "id1", "ping")]


def test_without_parallel_calls_the_first_one_is_kept() -> None:
    call = '<tool_call>{"name": "%s", "arguments": {"a": 1}}</tool_call>'
    text = call % "ping" + call % "weather" + "over"
    assert summary(parse([text], "hermes", parallel=False)) == (
        "",
        "over",
        [("ping", '{"a": 1}')],
    )


def test_unknown_functions_are_handed_on() -> None:
    for form, text in [
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<tool_call><function=nobody></function></tool_call>"),
        ("llama3_json", '{"name": "nobody", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
    ]:
        assert summary(parse([text], form)) == ("", "", [("nobody", "{}")])


@pytest.mark.parametrize(
    ("form", "text", "told"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pa', '{"city": "Pa'),
        ("hermes", '<tool_call>{"name": "weather"', ""),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Pa', '{"city": "Pa'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Pa', '{"city": "Pa'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>\nPa", '{"city": "Pa'),
    ],
)
def test_a_call_that_was_cut_is_told_as_far_as_it_came(form: str, text: str, told: str) -> None:
    assert summary(parse([text], form)) == ("", "", [("weather", told)])


def test_a_section_that_holds_no_call_is_text_without_its_markers() -> None:
    assert summary(parse(["<tool_call>\nI cannot.</tool_call>"], "hermes"))[1] == "I cannot."
    assert summary(parse(['<tool_call>{"nam": 1}</tool_call>'], "hermes"))[1] == '{"nam": 1}'
    assert summary(parse(["[TOOL_CALLS]Sorry, no"], "mistral"))[1] == "Sorry, no"


def test_what_may_be_a_marker_is_flushed_at_the_end() -> None:
    assert summary(parse(["1 < 2 <tool"], "hermes"))[1] == "1 < 2 <tool"


def test_arguments_stream_as_they_come() -> None:
    formats = choose_formats(None, tool_call_parser="hermes")
    parser = formats.make(TOOLS, "auto", starts_in_reasoning=False, call_ids=lambda: "i")
    assert parser.feed('<tool_call>{"name": "weather"') == [ToolStart(0, "i", "weather")]
    assert parser.feed(', "arguments": {"city": "P') == [ToolArguments(0, '{"city": "P')]
    assert parser.feed("aris") == [ToolArguments(0, "aris")]
    assert parser.feed('"}}') == [ToolArguments(0, '"}')]
    assert parser.feed("</tool_call>") == parser.finish() == []


def test_text_streams_up_to_what_may_be_a_marker() -> None:
    formats = choose_formats(None, tool_call_parser="hermes")
    parser = formats.make(TOOLS, "auto", starts_in_reasoning=False, call_ids=lambda: "i")
    assert parser.feed("a <b> <tool_") == [Text("a <b>")]
    assert parser.feed("x") == [Text(" <tool_x")]


def test_arguments_in_a_string_are_decoded() -> None:
    inner = json.dumps({"city": 'Köln "A"\n😀'}, ensure_ascii=False)
    text = f'<tool_call>{{"name": "weather", "arguments": {json.dumps(inner)}}}</tool_call>'
    assert summary(parse([text], "hermes"))[2] == [("weather", inner)]


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    text = '<tool_call>{"name": "a\\ud83d", "arguments": "x\\udc00"}</tool_call>'
    assert summary(parse([text], "hermes"))[2] == [("a\ufffd", "x\ufffd")]


def test_llama_objects_that_are_no_calls_stay_text() -> None:
    for text in ('{"name": "Bob", "age": 3}', '{"answer": 1}', " {}", "{", '{"name": "ping"}'):
        assert summary(parse([text], "llama3_json")) == ("", text, [])
    later = 'Use {"name": "ping", "parameters": {}}'
    assert summary(parse([later], "llama3_json")) == ("", later, [])


def test_function_tags_become_json_by_the_schema() -> None:
    tool = function(
        "f",
        text={"type": "string"},
        count={"type": "integer"},
        share={"type": "number"},
        on={"type": "boolean"},
        maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
        many={"type": "array", "items": {"type": "integer"}},
        ref={"$ref": "#/$defs/Point"},
        kind={"enum": ["1", "2"]},
        bad={"type": "integer"},
    )
    tool["function"]["parameters"]["$defs"] = {"Point": {"type": "object"}}
    values = {
        "text": "12\n 'x' \"y\"",
        "count": "12",
        "share": "1.5",
        "on": "True",
        "maybe": "null",
        "many": "[1, 2]",
        "ref": '{"x": 1}',
        "kind": "1",
        "bad": "twelve",
        "unknown": "7",
    }
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    [(name, arguments)] = summary(parse([text], "qwen3_coder", tools=[tool]))[2]
    assert name == "f"
    assert json.loads(arguments) == {
        "text": values["text"],
        "count": 12,
        "share": 1.5,
        "on": True,
        "maybe": None,
        "many": [1, 2],
        "ref": {"x": 1},
        "kind": "1",
        "bad": "twelve",
        "unknown": "7",
    }


def test_without_tools_or_with_none_markers_are_text() -> None:
    text = '<tool_call>{"name": "ping"}</tool_call>'
    assert summary(parse([text], "hermes", tools=[])) == ("", text, [])
    assert summary(parse([text], "hermes", choice="none")) == ("", text, [])


def test_a_demanded_call_of_a_model_without_a_form_is_json() -> None:
    text = '[{"name": "ping", "arguments": {}}]'
    assert summary(parse([text], "none", choice="required"))[2] == [("ping", "{}")]
    assert summary(parse([text], "none", choice="auto"))[1] == text


def test_ids_suit_the_template_that_takes_them_back() -> None:
    mistral = choose_formats(None, tool_call_parser="mistral")
    assert re.fullmatch("[A-Za-z0-9]{9}", mistral.new_call_id())
    other = choose_formats(None, tool_call_parser="hermes")
    assert other.new_call_id().startswith("call_")
    assert other.new_call_id() != other.new_call_id()
