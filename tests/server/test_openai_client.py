"""The official client, on a real socket: what its users do every day."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers.live_server import LiveServer, live_server

HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI)
    [choice] = answer.choices
    assert choice.message.content == "Hello there."
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello there."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HI, n=2) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.message.content for choice in final.choices] == ["Hello there."] * 2


def test_stream_helper_with_logprobs(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HI, logprobs=True) as stream:
        final = stream.get_final_completion()
    logprobs = final.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content).startswith("Hello there.")


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens
    chunks = client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there."


def test_extensions(server: LiveServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="tiny", messages=HI, extra_body={"top_k": 7, "min_p": 0.25}
    )
    params = server.core.requests[-1].sampling_params
    assert (params.top_k, params.min_p) == (7, 0.25)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias/of-tiny"]
    assert client.models.retrieve("alias/of-tiny").id == "alias/of-tiny"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-9", messages=HI)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HI, temperature=9)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "b" * 999}]
        )
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="tiny", input="a")


def test_an_error_in_a_stream_raises(server: LiveServer, client: openai.OpenAI) -> None:
    server.core.fail_after = 3
    stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert caught.value.code == "internal_error"


def test_retries_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 503 with Retry-After is tried again, and then succeeds."""
    with live_server(load_at_once=False) as server:
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=30, max_retries=5
        ) as client:
            asked = 0
            check_open = server.state.check_open

            def counting() -> None:
                nonlocal asked
                asked += 1
                if asked == 2:
                    server.finish_loading()
                check_open()

            monkeypatch.setattr(server.state, "check_open", counting)
            answer = client.chat.completions.create(model="tiny", messages=HI)
        assert answer.choices[0].message.content == "Hello there."
        assert asked > 2


def test_closing_a_stream_ends_the_request(server: LiveServer, client: openai.OpenAI) -> None:
    server.core.stall_after = 3
    stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_until(lambda: not server.core.running)
    assert len(server.core.aborted) == 1


def test_keys() -> None:
    with live_server(api_keys=("right",)) as server:
        for key, is_right in (("right", True), ("wrong", False)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=30) as client:
                if is_right:
                    client.chat.completions.create(model="tiny", messages=HI)
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.chat.completions.create(model="tiny", messages=HI)
