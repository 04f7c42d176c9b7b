"""Bodies that are nearly right: no answer is a 5xx, every error has its shape, the server lives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzz.bodies import CHAT, COMPLETIONS, HOSTILE, MESSAGE, SCHEMAS
from helpers.live_server import Answer, LiveServer, live_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]


def bodies(fields: dict[str, list[Any]], always: str) -> st.SearchStrategy[dict[str, Any]]:
    """A few fields, each plain or hostile; the required one mostly there."""

    def value(name: str) -> st.SearchStrategy[Any]:
        return st.one_of(st.sampled_from(fields[name]), st.sampled_from(HOSTILE))

    names = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    return names.flatmap(
        lambda picked: st.fixed_dictionaries(
            {
                always: st.one_of(*[st.sampled_from(fields[always])] * 3, value(always)),
                **{name: value(name) for name in picked if name != always},
            }
        )
    )


def messages() -> st.SearchStrategy[dict[str, Any]]:
    """Conversations, nearly right."""
    keys = st.lists(st.sampled_from(sorted(MESSAGE)), max_size=4, unique=True)
    one = keys.flatmap(
        lambda picked: st.fixed_dictionaries(
            {k: st.sampled_from(MESSAGE[k] * 2 + HOSTILE) for k in {*picked, "role"}}
        )
    )
    return st.fixed_dictionaries({"messages": st.lists(one, max_size=3), "max_tokens": st.just(2)})


def check(answer: Answer) -> None:
    assert answer.status < 500, answer.body
    if answer.status != 200:
        error = answer.error
        assert error["type"] == "invalid_request_error"
        assert len(answer.body) < 2048
        for told in ("Traceback", "0x7f", "/srv/", str(ROOT), "site-packages"):
            assert told not in error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = answer.events
        assert events[-1] == "[DONE]"
        assert not any("error" in event for event in events[:-1])


fuzz = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize(
    ("path", "strategy"),
    [
        ("/v1/chat/completions", bodies(CHAT, "messages")),
        ("/v1/completions", bodies(COMPLETIONS, "prompt")),
        ("/v1/chat/completions", messages()),
        ("/v1/chat/completions/render", messages()),
        ("/tokenize", bodies({"prompt": ["a"], "messages": CHAT["messages"]}, "prompt")),
        ("/detokenize", bodies({"tokens": [[5]]}, "tokens")),
    ],
)
def test_bodies_that_are_nearly_right(server: LiveServer, path: str, strategy: Any) -> None:
    core = server.core

    @fuzz
    @given(body=strategy)
    def run(body: dict[str, Any]) -> None:
        check(server.post(path, json.dumps(body).encode()))

    run()
    assert server.core is core
    assert server.chat().status == 200


CONTENTS = [
    "<think>a</think>b",
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>",
    '[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
    '{"name": "f", "parameters": {}}',
    "<tool_call></tool_call><tool_call>",
    "</think></think><think>",
]
FORMATS = {
    "hermes": "<tool_call> <think></think>",
    "qwen3_coder": "<tool_call><function=x><parameter=y> <think></think>",
    "mistral": "[TOOL_CALLS] [THINK][/THINK]",
    "llama3_json": "<|python_tag|>",
}


@pytest.mark.parametrize("markers", FORMATS.values(), ids=FORMATS)
def test_tools_that_are_nearly_right(markers: str) -> None:
    """Whatever the schemas, the choice and the model's text: no 5xx, streamed or whole."""
    function = st.fixed_dictionaries(
        {"name": st.just("f")},
        optional={
            "parameters": st.sampled_from(SCHEMAS + HOSTILE),
            "strict": st.sampled_from([True, False]),
        },
    )
    body = st.fixed_dictionaries(
        {
            "messages": st.just([{"role": "user", "content": "Hi"}]),
            "stream": st.booleans(),
            "tools": st.lists(
                st.fixed_dictionaries({"type": st.just("function"), "function": function}),
                min_size=1,
                max_size=2,
            ),
        },
        optional={
            "tool_choice": st.sampled_from(CHAT["tool_choice"]),
            "parallel_tool_calls": st.booleans(),
            "response_format": st.sampled_from(
                [
                    {"type": "json_object"},
                    *({"type": "json_schema", "json_schema": {"schema": s}} for s in SCHEMAS),
                ]
            ),
            "include_reasoning": st.booleans(),
            "logprobs": st.booleans(),
        },
    )
    template = "{#" + markers + "#}{% for m in messages %}{{ m.content }}{% endfor %}"
    with live_server(chat_template=template, structured_outputs=True) as server:

        @fuzz
        @given(body=body, content=st.sampled_from(CONTENTS), cut=st.integers(1, 90))
        def run(body: dict[str, Any], content: str, cut: int) -> None:
            server.core.reply = lambda request: content
            check(server.post("/v1/chat/completions", {**body, "max_tokens": cut}))

        run()


@fuzz
@given(
    data=st.binary(max_size=60),
    at=st.integers(0, 60),
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
)
def test_bodies_with_wrong_bytes(server: LiveServer, data: bytes, at: int, path: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}], "prompt": "a", "tokens": [1]}'
    check(server.post(path, body[:at] + data + body[at:]))


@pytest.mark.parametrize("value", ["1" * 5000, "-" + "1" * 5000, "0." + "1" * 5000, "1e400"])
@pytest.mark.parametrize("field", ["seed", "max_tokens", "temperature", "logit_bias", "prompt"])
def test_numbers_of_thousands_of_digits(server: LiveServer, field: str, value: str) -> None:
    text = {"logit_bias": '{"5": %s}', "prompt": "[%s]"}.get(field, "%s") % value
    body = f'{{"prompt": "a", "{field}": {text}}}'.encode()
    check(server.post("/v1/completions", body))
