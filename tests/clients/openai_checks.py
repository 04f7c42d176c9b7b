"""The official client, of today and of the 1.x series."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, Literal

import openai
from checks import (
    HI,
    MODEL,
    TOO_LONG,
    WEATHER,
    embed_url,
    is_weather,
    key,
    raised,
    run_checks,
    running,
    url,
    wait_until_idle,
)
from pydantic import BaseModel, Field

ON: dict[str, Any] = {"ignore_eos": True}
"""The random model's draws may end it early; where tokens are counted it goes on."""

client = openai.OpenAI(base_url=url(), api_key=key(), timeout=120, max_retries=0)


class Person(BaseModel):
    kind: Literal["child", "adult"]
    age: int = Field(ge=0, le=130)
    is_here: bool


def check_chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=9)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def check_stream() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=24)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HI,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def check_stream_helper() -> None:
    """It assembles the message itself, and is strict about the order of chunks."""
    with client.chat.completions.stream(
        model=MODEL, messages=HI, max_tokens=450, response_format=Person
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Person)


def check_completions() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[[5], [6, 7]], n=2, max_tokens=3, logprobs=2, extra_body=ON
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == 3
    whole = client.completions.create(model=MODEL, prompt="a", max_tokens=9, temperature=0)
    chunks = client.completions.create(
        model=MODEL, prompt="a", max_tokens=9, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def check_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=4, logprobs=True, top_logprobs=3, extra_body=ON
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content or []] == [3] * 4


def check_tools() -> None:
    """A call that must be made, its result in the next request."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=450,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert calls
    for call in calls:
        assert call.function.name == "weather"
        assert is_weather(call.function.arguments)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "20 C"} for call in calls]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[*HI, choice.message, *results],
        tools=[WEATHER],
        max_tokens=4,
        extra_body=ON,
    )
    assert answer.choices[0].finish_reason == "length"


def check_tools_in_a_stream() -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=450,
        stream=True,
    )
    names, arguments, reasons = [], "", []
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.index == 0
            assert call.function is not None
            if call.function.name:
                names.append(call.function.name)
            arguments += call.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert names == ["weather"]
    assert is_weather(arguments)
    assert reasons[-1] in ("stop", "tool_calls")


def check_json_schema() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=HI, response_format=Person, max_tokens=450
    )
    assert answer.choices[0].finish_reason == "stop"
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)


def check_many_at_once() -> None:
    """The asynchronous client; the same request gives the same text, whoever runs beside it."""

    async def run() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url(), api_key=key(), timeout=120) as many:
            answers = await asyncio.gather(
                *(
                    many.chat.completions.create(
                        model=MODEL,
                        messages=HI if i % 2 else [{"role": "user", "content": "x" * i}],
                        temperature=0,
                        max_tokens=12,
                    )
                    for i in range(8)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    texts = asyncio.run(run())
    assert len(set(texts[1::2])) == 1


def check_cancel_in_a_stream() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=450, stream=True, extra_body=ON
    )
    for _ in range(3):
        next(iter(stream))
    stream.close()
    wait_until_idle()
    check_chat()


def check_time_out() -> None:
    """A client that stops waiting for a whole answer is a client that goes."""
    impatient = client.with_options(timeout=0.005).chat.completions
    raised(
        openai.APITimeoutError,
        lambda: impatient.create(model=MODEL, messages=HI, max_tokens=480, n=4, extra_body=ON),
    )
    wait_until_idle()


def check_models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def error_of(kind: type[openai.APIStatusError], **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": HI, **fields}
    return raised(kind, lambda: client.chat.completions.create(**fields))


def check_unknown_model() -> None:
    error = error_of(openai.NotFoundError, model="gpt-9")
    assert (error.code, error.param) == ("model_not_found", "model")


def check_too_long() -> None:
    """An error with a status, also where a stream was asked for."""
    for stream in (False, True):
        error = error_of(openai.BadRequestError, messages=TOO_LONG, stream=stream)
        assert error.code == "context_length_exceeded"


def check_bad_field() -> None:
    error = error_of(openai.BadRequestError, temperature=9)
    assert (error.code, error.param) == ("invalid_value", "temperature")
    assert error.type == "invalid_request_error"


def check_wrong_key() -> None:
    with openai.OpenAI(base_url=url(), api_key="wrong", timeout=120) as stranger:
        error = raised(openai.AuthenticationError, stranger.models.list)
    assert error.code == "invalid_api_key"


def check_embeddings() -> None:
    """Both encodings (the client asks for base64 by itself), texts and token ids, in order."""
    with openai.OpenAI(base_url=embed_url(), api_key=key(), timeout=120) as embedder:
        found = embedder.embeddings.create(model=MODEL, input=["one", "two", "one"])
        assert [item.index for item in found.data] == [0, 1, 2]
        first, second, third = (item.embedding for item in found.data)
        assert first == third != second
        assert abs(sum(value * value for value in first) - 1) < 1e-4
        floats = embedder.embeddings.create(model=MODEL, input="one", encoding_format="float")
        pairs = zip(floats.data[0].embedding, first, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 1e-6
        assert found.usage.prompt_tokens == found.usage.total_tokens > 0
        assert len(embedder.embeddings.create(model=MODEL, input=[[5, 6], [7]]).data) == 2
        for bad in ([], "", [[-1]]):
            create = functools.partial(embedder.embeddings.create, model=MODEL, input=bad)
            raised(openai.BadRequestError, create)


def check_nothing_is_left() -> None:
    assert running() == 0


if __name__ == "__main__":
    run_checks(globals())
