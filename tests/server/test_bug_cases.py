"""Requests that broke other servers, by the number under which this project keeps them.

Cases that are about one thing only stand beside its other tests and carry their number there.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.live_server import LiveServer, live_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def param_of(answer: Any) -> str:
    assert answer.status == 400, answer.body
    param: str = answer.error["param"]
    return param


def test_b08_n_choices_each_with_its_own_end(server: LiveServer) -> None:
    lengths = iter([3, 9, 5, 7])
    server.core.reply = lambda request: "x" * next(lengths)
    document = server.complete(n=4, seed=7).json
    assert [choice["text"] for choice in document["choices"]] == ["x" * n for n in (3, 9, 5, 7)]
    assert {choice["finish_reason"] for choice in document["choices"]} == {"stop"}
    assert document["usage"]["completion_tokens"] == 3 + 9 + 5 + 7 + 4
    seeds = [request.sampling_params.seed for request in server.core.requests]
    assert len(set(seeds)) == 4


def test_b14_no_part_of_a_stop_string_is_shown(server: LiveServer) -> None:
    server.core.reply = lambda request: "ABCDEFGHIJKLM"
    events = server.chat(stream=True, stop=["DEFGHIJ"]).events
    pieces = [c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"]]
    assert "".join(pieces) == "ABC"
    assert not any("D" in piece for piece in pieces)
    # What only looked like the beginning of one comes back.
    server.core.reply = lambda request: "ABCDEFG!"
    events = server.chat(stream=True, stop=["DEFGHIJ"]).events
    pieces = [c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"]]
    assert "".join(pieces) == "ABCDEFG!"


def test_b15_empty_stops(server: LiveServer) -> None:
    for stop in ("", [""], ["a", ""]):
        assert param_of(server.complete(stop=stop)) == "stop"
    for stop in ([], None):
        assert server.complete(stop=stop).json["choices"][0]["finish_reason"] == "stop"


def test_b17_lists_without_end(server: LiveServer) -> None:
    assert param_of(server.complete(stop=["12345678"] * 500_000)) == "stop"
    assert param_of(server.complete(stop="x" * 1_000_000)) == "stop"
    assert param_of(server.complete(bad_words=["x"] * 50_000)) == "bad_words"
    assert server.complete(stop=[chr(0x4E00 + i) for i in range(64)]).status == 200


@pytest.mark.parametrize("hex_of", ["👩‍👩‍👧", "家", "ñ🇩🇪"])
def test_b21_characters_of_several_tokens(server: LiveServer, hex_of: str) -> None:
    text = f"a{hex_of}b"
    server.core.reply = lambda request: text
    for most in range(1, 2 + len(text.encode())):
        whole = server.complete(max_tokens=most).json["choices"][0]["text"]
        events = server.complete(max_tokens=most, stream=True).events
        streamed = "".join(c["text"] for e in events[:-1] for c in e["choices"])
        assert streamed == whole
        assert "\ufffd" not in whole.removesuffix("\ufffd"), "at most one, at the cut"
    assert whole == text


def test_b28_bias_of_what_is_no_token(server: LiveServer) -> None:
    for bias in ({"191222": -100}, {"-1": 5}, {"abc": 1}, {"5": 101}, {"5": "x"}, {"1.5": 1}):
        assert param_of(server.complete(logit_bias=bias)).startswith("logit_bias")


def test_b30_empty_prompts(server: LiveServer) -> None:
    for prompt in ("", [""], ["a", ""], [], [[]]):
        assert param_of(server.complete(prompt)).startswith("prompt")
    for content in ("", None):
        assert server.post(CHAT, {"messages": [{"role": "user", "content": content}]}).status == 200


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "logit_bias"])
def test_b31_numbers_that_json_has_not(server: LiveServer, field: str, value: str) -> None:
    text = f'{{"5": {value}}}' if field == "logit_bias" else value
    answer = server.post(COMPLETIONS, f'{{"prompt": "a", "{field}": {text}}}'.encode())
    assert answer.status == 400
    json.loads(answer.body)


def test_b32_top_k(server: LiveServer) -> None:
    for top_k in (-1, 0, 272, 9_999_999):
        assert server.complete(top_k=top_k).status == 200
        assert server.core.requests[-1].sampling_params.top_k == 0
    assert param_of(server.complete(top_k=-2)) == "top_k"


def test_b35_refused_before_the_stream_opens(server: LiveServer) -> None:
    for fields in ({"n": 0}, {"best_of": 2}, {"n": 2, "best_of": 1}, {"max_tokens": -1}):
        answer = server.complete(stream=True, **fields)
        assert answer.status == 400
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("n", [129, 10**9, 2**63 - 1])
def test_n_is_checked_before_anything_is_made_for_each_choice(server: LiveServer, n: int) -> None:
    """A conversation with a huge n held the whole server up; found by fuzzing."""
    for answer in (server.chat(n=n), server.complete(n=n), server.chat(n=n, stream=True)):
        assert param_of(answer) == "n"


def test_b36_max_tokens_beyond_the_room() -> None:
    with live_server(load_at_once=False) as server:
        server.reject_long_max_tokens = True
        server.finish_loading()
        server.wait_until(lambda: server.state.status == "ready")
        assert server.complete([70] * 250, max_tokens=6).status == 200
        answer = server.complete([70] * 250, max_tokens=7)
        assert param_of(answer) == "max_tokens"
        assert "at most 6" in answer.error["message"]
        body = {"messages": HI, "max_completion_tokens": 9999}
        assert param_of(server.post(CHAT, body)) == "max_completion_tokens"


def test_b37_one_prompt_of_a_batch_is_too_long(server: LiveServer) -> None:
    answer = server.complete(["short", "z" * 300])
    assert param_of(answer) == "prompt"
    assert answer.error["code"] == "context_length_exceeded"
    assert not server.core.requests


def test_b43_formats_without_a_schema(server: LiveServer) -> None:
    for bad in (
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "foo"},
    ):
        assert param_of(server.chat(response_format=bad)).startswith("response_format")
    assert server.chat(response_format={"type": "text"}).status == 200


def test_b45_tools_and_choices(server: LiveServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "hi", "tool_calls": []}, *HI]
    assert server.post(CHAT, {"messages": messages}).status == 200
    assert server.chat(tool_choice="none").status == 200
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        assert param_of(server.chat(tool_choice=choice)) == "tool_choice"


def test_b47_a_template_that_refuses() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system text, please') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with live_server(chat_template=template) as server:
        messages = [{"role": "system", "content": "x"}, *HI]
        for stream in (False, True):
            answer = server.post(CHAT, {"messages": messages, "stream": stream})
            assert param_of(answer) == "messages"
            assert "no system text, please" in answer.error["message"]
        assert server.chat().status == 200


def test_b49_text_with_a_zero(server: LiveServer) -> None:
    text = "before\0after"
    ids = server.post("/tokenize", {"prompt": text}).json["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json["prompt"] == text


def test_b51_small_requests_that_broke_others(server: LiveServer) -> None:
    assert server.send("POST", CHAT).status == 415
    assert param_of(server.post("/tokenize", {"messages": []})) == "messages"
    assert param_of(server.post("/detokenize", {"tokens": [-1]})) == "tokens[0]"


def test_b59_salts(server: LiveServer) -> None:
    for salt in ("", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", 5):
        assert param_of(server.chat(cache_salt=salt)) == "cache_salt"
    server.chat(cache_salt="a")
    server.chat()
    assert [request.cache_salt for request in server.core.requests] == ["a", None]
