"""``thinking_token_budget`` in a chat: what reaches the engine, and who is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.live_server import LiveServer, live_server

from twostep.contracts.sampling import StructuredOutputsParams
from twostep.server.parsers.formats import choose_formats


@pytest.fixture(scope="module")
def thinker() -> Iterator[LiveServer]:
    with live_server(structured_outputs=True) as server:
        formats = choose_formats(None, tool_call_parser="hermes", reasoning_parser="think")
        server.call(lambda: setattr(server.state, "formats", formats))
        yield server


def asked(server: LiveServer, **fields: Any) -> StructuredOutputsParams | None:
    """The constraint that the engine got."""
    answer = server.chat(**fields)
    assert answer.status == 200, answer.error
    found: StructuredOutputsParams | None
    found = server.core.requests[-1].sampling_params.structured_outputs
    return found


def test_the_engine_gets_the_budget_and_the_tags(thinker: LiveServer) -> None:
    found = asked(thinker, thinking_token_budget=5)
    assert found is not None
    assert found.grammar is None
    thinking = found.thinking
    assert thinking is not None
    assert (thinking.max_tokens, thinking.start, thinking.end) == (5, "<think>", "</think>")
    assert thinker.core.tokenizer.decode(thinking.end_token_ids) == "</think>"
    assert not thinking.is_thinking


def test_the_prompt_may_have_opened_it(thinker: LiveServer) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>"}]
    body = {"messages": messages, "continue_final_message": True, "thinking_token_budget": 0}
    assert thinker.post("/v1/chat/completions", body).status == 200
    found = thinker.core.requests[-1].sampling_params.structured_outputs
    assert found is not None
    assert found.thinking is not None
    assert found.thinking.is_thinking


@pytest.mark.parametrize("off", [None, -1])
def test_no_bound(thinker: LiveServer, off: int | None) -> None:
    assert asked(thinker, thinking_token_budget=off) is None


def test_beside_a_schema(thinker: LiveServer) -> None:
    """The schema is for the answer; the thoughts before it are bounded."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    plain = asked(thinker, response_format=schema)
    bounded = asked(thinker, response_format=schema, thinking_token_budget=3)
    assert plain is not None
    assert bounded is not None
    assert bounded.grammar == plain.grammar
    assert bounded.thinking is not None


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"thinking_token_budget": -2}, "invalid_value"),
        ({"thinking_token_budget": 1.5}, "invalid_type"),
        (
            {"thinking_token_budget": 3, "structured_outputs": {"grammar": "start: A"}},
            "invalid_value",
        ),
    ],
)
def test_refused(thinker: LiveServer, fields: dict[str, Any], code: str) -> None:
    error = thinker.chat(**fields).error
    assert (error["code"], error["param"]) == (code, "thinking_token_budget")


def test_who_does_not_reason_has_no_budget(server: LiveServer) -> None:
    error = server.chat(thinking_token_budget=3).error
    assert (error["code"], error["param"]) == ("unsupported_feature", "thinking_token_budget")
    assert server.chat(thinking_token_budget=-1).status == 200


def test_a_plain_text_has_no_budget(thinker: LiveServer) -> None:
    error = thinker.complete(thinking_token_budget=3).error
    assert (error["code"], error["param"]) == ("unsupported_feature", "thinking_token_budget")
    assert thinker.complete(thinking_token_budget=-1).status == 200
