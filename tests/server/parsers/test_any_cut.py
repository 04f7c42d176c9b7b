"""The events of an output do not depend on the pieces it arrives in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.parsers.parse import TOOLS, parse, summary

# Arguments of B44, and what else parsers trip over.
ARGUMENTS = [
    '{"wd": 23, "sd": 0.8, "tag": "AB39", "id": "m1"}',
    '{"command": "mkdir -p test/{test1,test2"}',
    '{"items": [{"a": 1}]}',
    r'{"q": "say \"hi\" \\", "end": "</tool_call>", "u": "\u00e9\ud83d\ude00"}',
    '{"open": "[TOOL_CALLS]x[ARGS]", "think": "</think><think>", "semi": "};{"}',
    r'{"quote": "\"}", "slash": "\\"}',
    "{}",
    "{ }",
    '{"deep": [[[{"x": [null, true, -1.5e3]}]]] }',
    '{"nl": "line\nbreak", "tab": "\t"}',
]

OUTPUTS: list[tuple[str, dict[str, Any]]] = [
    *[
        (f'Hi\n<tool_call>\n{{"name": "weather", "arguments": {a}}}\n</tool_call> ',
         {"tool_format": "hermes"})
        for a in ARGUMENTS
    ],
    ('<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>\n'
     '<tool_call>{"name": "ping"}</tool_call>\nbye', {"tool_format": "hermes"}),
    ('<tool_call>{"name": "weather", "arguments": {"city": "Par', {"tool_format": "hermes"}),
    ('<tool_call>{"name": "weather", "arguments": {"a": 1}\n</tool_call>x',
     {"tool_format": "hermes"}),
    ('<tool_call>{"name": "weather", "arguments": {"a": [1, <b</tool_call> after',
     {"tool_format": "hermes"}),
    ('[TOOL_CALLS]weather[ARGS]{"a": [1, [TOOL_CALLS]ping[ARGS]{}', {"tool_format": "mistral"}),
    ('<tool_call>\nno JSON </tool_call> text', {"tool_format": "hermes"}),
    ('<tool_call>\n<function=ping>\n</function>\n</tool_call>', {"tool_format": "hermes"}),
    ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"\\u00e9\\"}"}</tool_call>',
     {"tool_format": "hermes"}),
    ("<tool_call>{'name': 'ping', arguments: null, extra: 3}}</tool_call><tool",
     {"tool_format": "hermes"}),
    ('a < b <tool <tool_call', {"tool_format": "hermes", "reasoning": "think"}),
    ('hm</think>\n<tool_call>{"name":"ping","arguments":{}}</tool_call>',
     {"tool_format": "hermes", "reasoning": "think", "starts_in_reasoning": True}),
    ('<think>I call\n<tool_call>{"name":"ping","arguments":{}}</tool_call> <think>x</think> y',
     {"tool_format": "hermes", "reasoning": "think"}),
    ('<think>\nwell\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nSt "X"\n'
     'Y\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>'
     '<function=ping></function></tool_call>',
     {"tool_format": "qwen3_coder", "reasoning": "think"}),
    ('<function=weather>\n<parameter=city>\na < b\n\n<parameter=days>\nnone\n</function>\ntail',
     {"tool_format": "qwen3_coder"}),
    ('<tool_call>\n<function=weather>\n<parameter=city>\nPar', {"tool_format": "qwen3_coder"}),
    ('<tool_call>{"name": "ping", "arguments": {}}</tool_call>', {"tool_format": "qwen3_coder"}),
    *[
        (f'{{"name": "weather", "parameters": {a}}}', {"tool_format": "llama3_json"})
        for a in ARGUMENTS
    ],
    ('\n {"type": "function", "function": "ping", "parameters": {}} ; {"name": "ping", '
     '"parameters": {"x": 1}} and text', {"tool_format": "llama3_json"}),
    ('  {"name": "Bob", "age": 3} <|python_tag|>', {"tool_format": "llama3_json"}),
    ('{"name": "ping"', {"tool_format": "llama3_json"}),
    ('ok<|python_tag|>{"name": "ping", "parameters": {}}', {"tool_format": "llama3_json"}),
    ('<|python_tag|>print({"name": 1})', {"tool_format": "llama3_json"}),
    *[
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {a}}}, {{"name": "ping", '
         f'"arguments": {{}}, "id": "123456789"}}]', {"tool_format": "mistral"})
        for a in ARGUMENTS
    ],
    *[
        (f"text [TOOL_CALLS]weather[ARGS]{a}[TOOL_CALLS]ping[CALL_ID]abc[ARGS]{{}} z",
         {"tool_format": "mistral"})
        for a in ARGUMENTS
    ],
    ('[TOOL_CALLS]weather{"city": "Paris"', {"tool_format": "mistral"}),
    ('[TOOL_CALLS]Sorry, I cannot[TOOL_CALLS]ping[ARGS]', {"tool_format": "mistral"}),
    ('[THINK]a[b[/THINK]c[TOOL_CALLS]ping[ARGS]{"x": [[1]]}',
     {"tool_format": "mistral", "reasoning": "mistral"}),
    ('[{"name": "ping", "arguments": {}}, {"name": "weather", "arguments": {"city": "x"}}]',
     {"tool_format": "json", "choice": "required"}),
    ('{"function": {"name": "ping", "arguments": [1, 2]}}', {"tool_format": "json"}),
    ("A final thought.</think>Answer starts.", {"reasoning": "think", "starts_in_reasoning": True}),
    ("A final thought.</think>Answer </think>starts <think>again",
     {"reasoning": "think", "starts_in_reasoning": True}),
    ("<think></think>\n\nhi \n", {"reasoning": "think"}),
    ("<think>\n\n</think>\n\nhi", {"reasoning": "think"}),
    ("<think>cut short \n", {"reasoning": "think"}),
    ("thoughts without an end </thin", {"reasoning": "think", "starts_in_reasoning": True}),
    (" plain <text> [with] {braces} ", {}),
    ('no call:  {"name": "ping"} \n x', {"tool_format": "json"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "how"), OUTPUTS)
def test_cut_at_every_position_and_at_all_of_them(text: str, how: dict[str, Any]) -> None:
    whole = parse([text], **how)
    assert parse(list(text), **how) == whole
    for first in range(len(text) + 1):
        second = min(first + 5, len(text))
        assert parse([text[:first], text[first:second], text[second:]], **how) == whole


_CALLS = {
    "hermes": '<tool_call>{"name": "weather", "arguments": %s}</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": %s}',
    "mistral": "[TOOL_CALLS]weather[ARGS]%s",
    "json": '[{"name": "weather", "arguments": %s}]',
}


@pytest.mark.parametrize("form", _CALLS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_arrive_as_they_were_written_b44(form: str, arguments: str) -> None:
    text = _CALLS[form] % arguments
    for pieces in ([text], list(text)):
        assert summary(parse(pieces, form)) == ("", "", [("weather", arguments)])


_FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=weather>", "</function>",
    "<parameter=city>", "<parameter=days>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", '{"name": "weather", ', '"arguments": ', '"parameters": ', "{", "}", "[", "]",
    '"', "\\", "'", ",", ";", ":", "\n", " ", "ping", "1", "null", "\\ud83d", "\\u00", "é", "<",
    "</", '{"name": "ping", "arguments": {"a": [1]}}', '{"city": "x"}', "name", "function",
    "\u2028",
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_mixture_of_markers_cut_anywhere(data: st.DataObject) -> None:
    fragments = data.draw(st.lists(st.sampled_from(_FRAGMENTS), min_size=1, max_size=14))
    text = "".join(fragments)
    how: dict[str, Any] = {
        "tool_format": data.draw(
            st.sampled_from(["hermes", "qwen3_coder", "llama3_json", "mistral", "json", "none"])
        ),
        "reasoning": data.draw(st.sampled_from(["think", "none"])),
        "starts_in_reasoning": data.draw(st.booleans()),
        "parallel": data.draw(st.booleans()),
    }
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text], **how)
    assert parse(pieces, **how) == whole
    assert parse(list(text), **how) == whole
    summary(whole)  # indices count up, arguments follow their call
    json.dumps([str(event) for event in whole]).encode()  # no lone surrogates


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=6), _JSON), ascii=st.booleans(), data=st.data())
def test_any_arguments_arrive_as_they_were_written(
    arguments: dict[str, Any], ascii: bool, data: st.DataObject
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii)
    form, text = data.draw(
        st.sampled_from(
            [
                ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'),
                ("llama3_json", f'{{"name": "f", "parameters": {written}}}'),
                ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {written}}}]'),
                ("mistral", f"[TOOL_CALLS]f[ARGS]{written}"),
                ("json", f'[{{"name": "f", "arguments": {written}}}]'),
            ]
        )
    )
    size = data.draw(st.integers(1, 9))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    reasoning, answer, calls = summary(parse(pieces, form, tools=TOOLS))
    assert (reasoning, answer, calls) == ("", "", [("f", written)])
