"""Every row of the error table, by raw HTTP."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from helpers.live_server import Answer, LiveServer, live_server
from helpers.scripted_core import MAX_MODEL_LEN

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def check(answer: Answer, status: int, code: str, param: str | None, kind: str) -> dict[str, Any]:
    error = answer.error
    assert (answer.status, error["code"], error["param"], error["type"]) == (
        status,
        code,
        param,
        kind,
    ), error
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert len(answer.body) < 2048
    return error


BAD = "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "m", "stream": true, x}',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a\\ud83d"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a"} trailing',
        b'{"unknown": ' + b"[" * 100_000,
    ],
)
def test_b49_b51_body_is_not_json(server: LiveServer, body: bytes) -> None:
    check(server.post(COMPLETIONS, body), 400, "invalid_json", None, BAD)


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        # A required field is missing, or null.
        (CHAT, {}, "missing_required_parameter", "messages"),
        (CHAT, {"messages": None}, "missing_required_parameter", "messages"),
        (CHAT, {"messages": [{}]}, "missing_required_parameter", "messages[0].role"),
        (COMPLETIONS, {}, "missing_required_parameter", "prompt"),
        ("/detokenize", {}, "missing_required_parameter", "tokens"),
        ("/tokenize", {}, "missing_required_parameter", "prompt"),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_schema"}},
            "missing_required_parameter",
            "response_format.json_schema",
        ),
        (
            CHAT,
            {
                "messages": HI,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x"}},
            },
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        (
            CHAT,
            {"messages": HI, "tools": [{"type": "function"}]},
            "missing_required_parameter",
            "tools[0].function",
        ),
        # Wrong types.
        (CHAT, [], "invalid_type", None),
        (CHAT, {"messages": "Hi"}, "invalid_type", "messages"),
        (CHAT, {"messages": [{"role": 5}]}, "invalid_type", "messages[0].role"),
        (CHAT, {"messages": HI, "logprobs": 1}, "invalid_type", "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "invalid_type", "logprobs"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "invalid_type", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 5.5}, "invalid_type", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "invalid_type", "temperature"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "invalid_type", "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "invalid_type", "prompt[1]"),
        (
            COMPLETIONS,
            {"prompt": "a", "logit_bias": {"5": None}},
            "missing_required_parameter",
            "logit_bias[...]",
        ),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "invalid_type", "stream"),
        # Out of range.
        *[
            (COMPLETIONS, {"prompt": "a", name: value}, "invalid_value", name)
            for name, value in [
                ("temperature", -1),
                ("temperature", 2.1),
                ("temperature", 5),
                ("top_p", 0),
                ("top_p", 2),
                ("top_p", -0.1),
                ("top_k", -2),
                ("min_p", 2),
                ("frequency_penalty", 100),
                ("presence_penalty", -2.5),
                ("repetition_penalty", 0),
                ("n", 0),
                ("n", -1),
                ("n", 129),
                ("seed", 2**63),
                ("max_tokens", -1),
                ("max_tokens", 0),
                ("min_tokens", -1),
                ("min_tokens", 17),
                ("logprobs", 21),
                ("logprobs", -1),
                ("prompt_logprobs", 21),
                ("stop", ""),
                ("stop", [""]),
                ("stop", ["a", ""]),
                ("stop", ["a"] * 65),
                ("stop", "a" * 257),
                ("bad_words", [" "]),
                ("bad_words", [""]),
                ("stop_token_ids", [-1]),
                ("stop_token_ids", [272]),
                ("allowed_token_ids", []),
                ("logit_bias", {"272": 1}),
                ("logit_bias", {"191222": -100}),
                ("logit_bias", {"-1": 5}),
                ("logit_bias", {"abc": 1}),
                ("logit_bias", {"5": 101}),
                ("priority", 1),
                ("cache_salt", ""),
                ("cache_salt", "a/b"),
                ("request_id", "a b"),
                ("truncate_prompt_tokens", 0),
                ("truncate_prompt_tokens", -2),
                ("best_of", 2),
                ("stream_options", {}),
                ("stream_interval", 0),
                ("repetition_detection", {"max_pattern_size": 0}),
                ("structured_outputs", {}),
                ("structured_outputs", {"regex": "a", "choice": ["a"]}),
            ]
        ],
        (COMPLETIONS, {"prompt": ""}, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": []}, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [""]}, "invalid_value", "prompt[0]"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
        (COMPLETIONS, {"prompt": [[]]}, "invalid_value", "prompt[0]"),
        (COMPLETIONS, {"prompt": [[-1]]}, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [5279552648203111001]}, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [272]}, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 1025}, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "temperature": 0}, "invalid_value", "n"),
        (COMPLETIONS, {"prompt": "a", "n": 0, "stream": True}, "invalid_value", "n"),
        (
            COMPLETIONS,
            {"prompt": "a", "prompt_logprobs": 1, "stream": True},
            "invalid_value",
            "prompt_logprobs",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "allowed_token_ids": [70], "bad_words": ["B"]},
            "invalid_value",
            "bad_words",
        ),
        (CHAT, {"messages": HI, "max_tokens": 0}, "invalid_value", "max_tokens"),
        (
            CHAT,
            {"messages": HI, "max_completion_tokens": 0},
            "invalid_value",
            "max_completion_tokens",
        ),
        (CHAT, {"messages": HI, "top_logprobs": 3}, "invalid_value", "top_logprobs"),
        (
            CHAT,
            {"messages": HI, "logprobs": True, "top_logprobs": 21},
            "invalid_value",
            "top_logprobs",
        ),
        (CHAT, {"messages": HI, "reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "foo"}},
            "invalid_value",
            "response_format.type",
        ),
        (
            CHAT,
            {"messages": HI, "chat_template_kwargs": {"messages": []}},
            "invalid_value",
            "chat_template_kwargs",
        ),
        # Options that exclude each other.
        (
            CHAT,
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "invalid_value",
            "continue_final_message",
        ),
        (
            CHAT,
            {
                "messages": HI,
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
            "invalid_value",
            "structured_outputs",
        ),
        # Messages and tools.
        (CHAT, {"messages": []}, "invalid_value", "messages"),
        (
            CHAT,
            {"messages": [{"role": "alien", "content": "x"}]},
            "invalid_value",
            "messages[0].role",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "poem"}]}]},
            "invalid_value",
            "messages[0].content[0].type",
        ),
        (CHAT, {"messages": HI, "tools": []}, "invalid_value", "tools"),
        (CHAT, {"messages": HI, "tool_choice": "auto"}, "invalid_value", "tool_choice"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, "invalid_value", "tool_choice"),
        (
            CHAT,
            {"messages": HI, "tools": [TOOL], "tool_choice": "maybe"},
            "invalid_value",
            "tool_choice",
        ),
        (
            CHAT,
            {
                "messages": HI,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "invalid_value",
            "tool_choice.function.name",
        ),
        (
            CHAT,
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "invalid_value",
            "tools[0].function.name",
        ),
        # The prompt is too long.
        (COMPLETIONS, {"prompt": [5] * MAX_MODEL_LEN}, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b" * 300]}, "context_length_exceeded", "prompt"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "b" * 300}]},
            "context_length_exceeded",
            "messages",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "b" * 300}], "stream": True},
            "context_length_exceeded",
            "messages",
        ),
        # What is not built.
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "unsupported_feature",
            "messages[0].content[0]",
        ),
        # The template has no place for them.
        (CHAT, {"messages": HI, "documents": [{"a": 1}]}, "unsupported_feature", "documents"),
        (CHAT, {"messages": HI, "modalities": ["audio"]}, "unsupported_feature", "modalities"),
        (
            CHAT,
            {"messages": HI, "chat_template": "{{ 1 }}"},
            "unsupported_feature",
            "chat_template",
        ),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "structural_tag"}},
            "unsupported_feature",
            "response_format.type",
        ),
        (
            CHAT,
            {"messages": HI, "tools": [{"type": "web_search"}]},
            "unsupported_feature",
            "tools[0].type",
        ),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "unsupported_feature", "suffix"),
        ("/v1/embeddings", {"input": "a"}, "unsupported_feature", "model"),
        # Ids.
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": [1, 272]}, "invalid_value", "tokens[1]"),
        ("/tokenize", {"messages": []}, "invalid_value", "messages"),
        ("/v1/tokenize", {"prompt": "a", "messages": HI}, "invalid_value", "prompt"),
    ],
)
def test_400(server: LiveServer, path: str, body: Any, code: str, param: str | None) -> None:
    check(server.post(path, body), 400, code, param, BAD)
    assert not server.core.requests, "nothing of a refused request may reach the core"


def test_words_that_clients_look_for(server: LiveServer) -> None:
    message = server.complete([5] * 300).error["message"]
    assert f"This model's maximum context length is {MAX_MODEL_LEN} tokens." in message
    assert "However, your prompt contains 300 input tokens" in message


def test_out_of_memory_of_the_core_is_the_clients_error(server: LiveServer) -> None:
    """B01: the core refuses what can never be scheduled; the status is still open then."""
    server.core.refuse = "the prompt needs 40 KV blocks, but the KV cache has 16"
    for stream in (False, True):
        error = check(server.chat(stream=stream), 400, "invalid_value", "messages", BAD)
        assert "has 16" in error["message"]


@pytest.mark.parametrize("given", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_415(server: LiveServer, given: str) -> None:
    headers = {"Content-Type": given} if given else {}
    answer = server.send("POST", CHAT, json.dumps({"messages": HI}), headers)
    check(answer, 415, "unsupported_media_type", None, BAD)


@pytest.mark.parametrize("given", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_by_other_names(server: LiveServer, given: str) -> None:
    body = json.dumps({"messages": HI})
    assert server.send("POST", CHAT, body, {"Content-Type": given}).status == 200


def test_413() -> None:
    with live_server(max_request_bytes=1000) as server:
        body = json.dumps({"prompt": "a" * 2000}).encode()
        answer = server.post(COMPLETIONS, body)
        check(answer, 413, "request_too_large", None, BAD)
        assert answer.headers["connection"] == "close"
        # Chunked: the size is not declared, so it is counted.
        sock = server.connect()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        # All in one piece: after the refusal nothing is read, and more would be reset.
        sock.sendall((b"190\r\n" + b"x" * 400 + b"\r\n") * 5)
        data = sock.recv(65536)
        assert b" 413 " in data.splitlines()[0]
        assert b"request_too_large" in data
        sock.close()


def test_404_model(server: LiveServer) -> None:
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "a"})):
        answer = server.post(path, {"model": "gpt-9", **body})
        error = check(answer, 404, "model_not_found", "model", BAD)
        assert "`gpt-9` does not exist" in error["message"]
        assert "tiny" in error["message"]
    check(server.get("/v1/models/gpt-9"), 404, "model_not_found", "model", BAD)


def test_404_path(server: LiveServer) -> None:
    for path in ("/nothing", "/v1", "/v2/chat", CHAT + "/", "/v1/chat/completions/x"):
        check(server.get(path), 404, "unknown_url", None, BAD)


def test_405(server: LiveServer) -> None:
    answer = server.get(CHAT)
    check(answer, 405, "method_not_allowed", None, BAD)
    assert answer.headers["allow"] == "POST"
    answer = server.send("DELETE", "/v1/models")
    check(answer, 405, "method_not_allowed", None, BAD)
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_500_of_one_request_tells_nothing_of_the_machine(server: LiveServer) -> None:
    server.core.fail_after = 3
    error = check(server.chat(), 500, "internal_error", None, "server_error")
    assert "/srv" not in error["message"]
    assert "0x7f" not in error["message"]
    server.core.fail_after = None
    assert server.chat().status == 200


def test_500_of_a_bug_of_ours(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unhandled exception: no traceback to the client, all of it to the log."""
    monkeypatch.setattr(server.state, "check_model", lambda name: 1 / 0)
    error = check(server.chat(), 500, "internal_error", None, "server_error")
    assert "division" not in error["message"]
    assert any("ZeroDivisionError" in str(record.exc_info) for record in caplog.records)


def test_an_error_shows_little_of_the_input(server: LiveServer) -> None:
    """A value of 100 kB does not come back."""
    for field in ("role", "content"):
        message = {"role": "user", "content": "a", field: [{"type": "x" * 100_000}]}
        if field == "role":
            message["role"] = "y" * 100_000
        answer = server.post(CHAT, {"messages": [message]})
        assert answer.status == 400
        assert "x" * 201 not in answer.error["message"]
        assert "y" * 201 not in answer.error["message"]
        assert len(answer.body) < 2048


def test_503_of_a_full_queue() -> None:
    with live_server(max_num_queued_reqs=2, max_num_queued_tokens=50) as server:
        server.core.stall_after = 0
        streams = [server.open_stream(COMPLETIONS, {"prompt": "Once", "n": 2, "seed": 1})]
        server.wait_until(lambda: server.state.in_flight.queued_reqs == 2)
        answer = server.complete()
        check(answer, 503, "server_overloaded", None, "service_unavailable_error")
        assert answer.headers["retry-after"] == "1"
        streams[0].close()
        server.wait_until(lambda: server.state.in_flight.queued_reqs == 0)
        streams = [server.open_stream(COMPLETIONS, {"prompt": [5] * 40})]
        server.wait_until(lambda: server.state.in_flight.queued_tokens == 40)
        answer = server.complete([5] * 20)
        check(answer, 503, "server_overloaded", None, "service_unavailable_error")
        assert "--max-num-queued-tokens" in answer.error["message"]
        streams[0].close()


def test_who_is_refused_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusing must cost next to nothing: a crowd would slow down those who are served."""
    with live_server(max_num_queued_reqs=1) as server:
        server.core.stall_after = 0
        stream = server.open_stream(COMPLETIONS, {"prompt": "Once"})
        server.wait_until(lambda: server.state.in_flight.queued_reqs == 1)
        tokenizer = server.state.engine.tokenizer
        monkeypatch.setattr(tokenizer, "encode", lambda *_: pytest.fail("was tokenized"))
        for answer in (server.complete(truncate_prompt_tokens=1), server.chat()):
            check(answer, 503, "server_overloaded", None, "service_unavailable_error")
        stream.close()


def test_what_the_refused_sent_is_not_read() -> None:
    """Not even parsed, while it would be refused anyway; the connection goes on."""
    with live_server(max_num_queued_reqs=1) as server:
        server.core.stall_after = 0
        stream = server.open_stream(COMPLETIONS, {"prompt": "Once"})
        server.wait_until(lambda: server.state.in_flight.queued_reqs == 1)
        for path in (COMPLETIONS, CHAT, "/v1/embeddings"):
            answer = server.send("POST", path, b"{no json", {"Content-Type": "text/plain"})
            check(answer, 503, "server_overloaded", None, "service_unavailable_error")
        assert server.post("/tokenize", {"prompt": "Once"}).status == 200
        # Answered while the body is still on its way; the next request follows on the connection.
        slow = http.client.HTTPConnection("127.0.0.1", server.port, timeout=50)
        slow.putrequest("POST", COMPLETIONS)
        slow.putheader("Content-Length", "1000")
        slow.endheaders(b"x" * 10)
        sock = slow.sock
        response = slow.getresponse()
        assert response.status == 503
        response.read()
        slow.send(b"x" * 990)
        as_json = {"Content-Type": "application/json"}
        slow.request("POST", "/tokenize", b'{"prompt": "Once"}', as_json)
        assert slow.getresponse().status == 200
        assert slow.sock is sock
        slow.close()
        stream.close()


def test_504() -> None:
    with live_server(request_timeout=0.3) as server:
        server.core.stall_after = 2
        answer = server.chat()
        check(answer, 504, "request_timeout", None, "timeout_error")
        events = server.chat(stream=True).events
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "request_timeout"
        server.wait_until(lambda: not server.core.running)
