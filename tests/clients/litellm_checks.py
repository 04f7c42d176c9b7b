"""LiteLLM: the library with which routers and proxies call OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import litellm
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
    url,
    wait_until_idle,
)
from pydantic import BaseModel, Field


class Person(BaseModel):
    kind: Literal["child", "adult"]
    age: int = Field(ge=0, le=130)
    is_here: bool


def options(**fields: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": url(),
        "api_key": key(),
        "messages": HI,
        "temperature": 0,
        "timeout": 120,
        "num_retries": 0,
        **fields,
    }


def check_chat() -> None:
    answer = litellm.completion(**options(max_tokens=9))
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 9


def check_stream() -> None:
    whole = litellm.completion(**options(max_tokens=24))
    chunks = list(
        litellm.completion(
            **options(max_tokens=24, stream=True, stream_options={"include_usage": True})
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=HI)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.usage.completion_tokens == 24


def check_many_at_once() -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(**options(max_tokens=8)) for _ in "abcd"))

    assert len({answer.choices[0].message.content for answer in asyncio.run(run())}) == 1


def check_text_completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="a",
        api_base=url(),
        api_key=key(),
        max_tokens=5,
        temperature=0,
        timeout=120,
    )
    assert answer.usage.completion_tokens == 5


def check_tools() -> None:
    answer = litellm.completion(
        **options(
            max_tokens=450, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
        )
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.function.name == "weather"
        assert is_weather(call.function.arguments)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "20 C"} for call in calls]
    messages = [*HI, answer.choices[0].message.model_dump(), *results]
    last = litellm.completion(**options(messages=messages, tools=[WEATHER], max_tokens=4))
    assert last.choices[0].finish_reason == "length"


def check_tools_in_a_stream() -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    chunks = list(
        litellm.completion(
            **options(max_tokens=450, tools=[WEATHER], tool_choice=choice, stream=True)
        )
    )
    rebuilt = litellm.stream_chunk_builder(chunks, messages=HI)
    [call] = rebuilt.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert is_weather(call.function.arguments)


def check_json_schema() -> None:
    answer = litellm.completion(**options(max_tokens=450, response_format=Person))
    Person.model_validate_json(answer.choices[0].message.content)


def check_cancel_in_a_stream() -> None:
    async def run() -> None:
        stream = await litellm.acompletion(
            **options(max_tokens=450, stream=True, extra_body={"ignore_eos": True})
        )
        count = 0
        async for _ in stream:
            count += 1
            if count == 3:
                break
        await stream.aclose()

    asyncio.run(run())
    wait_until_idle()


def check_embeddings() -> None:
    found = litellm.embedding(
        model=f"openai/{MODEL}",
        input=["one", "two", "one"],
        api_base=embed_url(),
        api_key=key(),
        timeout=120,
    )
    first, second, third = (item["embedding"] for item in found.data)
    assert first == third != second
    assert found.usage.prompt_tokens > 0


def check_errors() -> None:
    def error_of(kind: type[Exception], **fields: Any) -> None:
        raised(kind, lambda: litellm.completion(**options(**fields)))

    error_of(litellm.NotFoundError, model="openai/gpt-9")
    error_of(litellm.ContextWindowExceededError, messages=TOO_LONG)
    error_of(litellm.BadRequestError, temperature=9)
    error_of(litellm.AuthenticationError, api_key="wrong")


if __name__ == "__main__":
    run_checks(globals())
