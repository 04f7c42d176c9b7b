"""Tool calls and reasoning through HTTP: streamed and whole answers say the same (B44, B57)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.live_server import LiveServer, live_server

from twostep.server.parsers.formats import choose_formats

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGUMENTS = '{"city": "K\\u00f6ln", "x": [{"a": "}</tool_call>"}]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
PING = '<tool_call>{"name": "ping"}</tool_call>'


@pytest.fixture(scope="module")
def tools_server() -> Iterator[LiveServer]:
    with live_server() as server:
        formats = choose_formats(None, tool_call_parser="hermes", reasoning_parser="think")
        server.call(lambda: setattr(server.state, "formats", formats))
        yield server


def says(server: LiveServer, text: str) -> None:
    """What the model writes from now on."""

    def script() -> None:
        server.core.reply = lambda request: text

    server.call(script)


def joined(events: list[Any]) -> tuple[str, str, list[tuple[str, str]], str]:
    """(reasoning, content, [(name, arguments)], finish reason) of a stream, its order checked."""
    assert events[-1] == "[DONE]"
    chunks = [chunk for chunk in events[:-1] if chunk["choices"]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    ids: set[str] = set()
    reasons = []
    for chunk in chunks:
        choice = chunk["choices"][0]
        assert not reasons, "nothing comes after the end"
        delta = choice["delta"]
        reasoning += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["type"] == "function"
                assert call["index"] == len(calls)
                assert call["id"] not in ids
                ids.add(call["id"])
                calls.append((call["function"]["name"], call["function"]["arguments"]))
            else:
                assert call["index"] == len(calls) - 1
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + call["function"]["arguments"])
        if choice["finish_reason"] is not None:
            reasons.append(choice["finish_reason"])
    [reason] = reasons
    return reasoning, content, calls, reason


def whole(document: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    [choice] = document["choices"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    return (
        message.get("reasoning") or "",
        message["content"] or "",
        calls,
        choice["finish_reason"],
    )


CASES = [
    (CALL, {}, ("", "", [("weather", ARGUMENTS)], "tool_calls")),
    (
        f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{PING}",
        {},
        ("Hm.", "Let me see.", [("weather", ARGUMENTS), ("ping", "{}")], "tool_calls"),
    ),
    (CALL + PING, {"parallel_tool_calls": False}, ("", "", [("weather", ARGUMENTS)], "tool_calls")),
    ("<think>Hm.</think>Hello", {}, ("Hm.", "Hello", [], "stop")),
    ("No call < here <tool", {}, ("", "No call < here <tool", [], "stop")),
    (CALL, {"tool_choice": "none"}, ("", CALL, [], "stop")),
    ("<think>so long a thought", {"max_tokens": 12}, ("so l", "", [], "length")),
]


@pytest.mark.parametrize("pace", [1, 3, 1000])
@pytest.mark.parametrize(("text", "fields", "told"), CASES)
def test_streamed_and_whole_say_the_same(
    tools_server: LiveServer, text: str, fields: dict[str, Any], told: object, pace: int
) -> None:
    says(tools_server, text)
    tools_server.call(lambda: setattr(tools_server.core, "tokens_per_tick", pace))
    asked = {"tools": [TOOL], "max_tokens": 200, **fields}
    if "max_tokens" in fields:
        del asked["max_tokens"]
        asked["max_completion_tokens"] = fields["max_tokens"]
    answer = whole(tools_server.chat("x", **asked).json)
    stream = joined(tools_server.chat("x", stream=True, **asked).events)
    assert answer == stream
    if "max_tokens" not in fields:
        assert answer == told
    else:
        reasoning, content, calls, reason = answer
        assert text.removeprefix("<think>").startswith(reasoning)
        assert (content, calls, reason) == ("", [], "length")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "text",
    [
        "Plain: naïve 👩‍👩‍👧 家, no < markers <tool here.",
        f"Let me see. {CALL}",
        f"<think>\nHm, 家?\n</think>\n\n{CALL}{PING}",
        "<think>Hm.</think>The answer.",
    ],
    ids=["text", "tool", "reasoning and tools", "reasoning"],
)
def test_every_chunking_says_the_same_and_counts_the_same(
    tools_server: LiveServer, text: str
) -> None:
    """However many tokens come at once; usage is the number of tokens that the core sent."""
    says(tools_server, text)
    ids = tools_server.state.engine.tokenizer.encode(text, False)
    asked: dict[str, Any] = {"tools": [TOOL], "max_tokens": 220, "return_token_ids": True}
    asked["stream_options"] = {"include_usage": True}
    told = None
    for pace in range(1, len(ids) + 2):
        tools_server.call(lambda n=pace: setattr(tools_server.core, "tokens_per_tick", n))
        if told is None:
            fields = {name: value for name, value in asked.items() if name != "stream_options"}
            document = tools_server.chat("x", **fields).json
            told = whole(document)
            assert document["usage"]["completion_tokens"] == len(ids) + 1  # and the end of text
        events = tools_server.chat("x", stream=True, **asked).events
        assert joined(events) == told, pace
        assert events[-2]["usage"]["completion_tokens"] == len(ids) + 1
        sent = [t for e in events[:-1] for c in e["choices"] for t in c.get("token_ids") or []]
        assert sent[: len(ids)] == ids
        assert len(sent) == len(ids) + 1


def test_a_call_cut_by_max_tokens_keeps_its_beginning(tools_server: LiveServer) -> None:
    says(tools_server, CALL)
    full = len(tools_server.state.engine.tokenizer.encode(CALL, False))
    document = tools_server.chat("x", tools=[TOOL], max_tokens=full - 30).json
    _, content, [(name, arguments)], reason = whole(document)
    assert (content, name, reason) == ("", "weather", "length")
    assert ARGUMENTS.startswith(arguments)
    assert document["usage"]["completion_tokens"] == full - 30


def test_what_was_chosen_is_told(tools_server: LiveServer) -> None:
    formats = tools_server.get("/server_info").json["output_formats"]
    assert formats["tool_format"] == "hermes"
    assert formats["tool_reason"] == "--tool-call-parser hermes"
    assert formats["reasoning_format"] == "think"


def test_calls_come_back_into_the_prompt(tools_server: LiveServer) -> None:
    says(tools_server, CALL)
    answer = tools_server.chat("x", tools=[TOOL], max_tokens=200).json
    message = answer["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["city"] == "Köln"
    follow_up = [
        {"role": "user", "content": "x"},
        {**message, "content": message["content"] or ""},
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "20 C"},
    ]
    body = {"messages": follow_up, "tools": [TOOL], "max_tokens": 4}
    assert tools_server.post("/v1/chat/completions", body).status == 200
