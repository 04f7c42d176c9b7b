"""LangChain's chat models on this server: what agents are built from."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from checks import (
    HI,
    MODEL,
    TOO_LONG,
    embed_url,
    is_weather,
    key,
    raised,
    run_checks,
    url,
    wait_until_idle,
)
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    kind: Literal["child", "adult"]
    age: int = Field(ge=0, le=130)
    is_here: bool


@tool
def weather(
    city: Literal["Paris", "Rome"], days: int = Field(description="how many", ge=1, le=9)
) -> str:
    """The weather of a city."""
    return f"{city}: 20 C for {days} days"


def model(**options: Any) -> ChatOpenAI:
    options = {"max_tokens": 450, "api_key": key(), "temperature": 0, **options}
    return ChatOpenAI(model=MODEL, base_url=url(), timeout=120, max_retries=0, **options)


def check_chat() -> None:
    answer = model(max_tokens=9).invoke("Hi")
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 9


def check_stream() -> None:
    chat = model(max_tokens=24, stream_usage=True)
    whole = chat.invoke("Hi")
    joined: AIMessageChunk | None = None
    for chunk in chat.stream("Hi"):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None
    assert joined.content == whole.content
    assert joined.usage_metadata is not None
    assert joined.usage_metadata["output_tokens"] == 24


def check_many_at_once() -> None:
    answers = model(max_tokens=8).batch(["Hi", "Ho", "Hi"])
    assert answers[0].content == answers[2].content
    again = asyncio.run(model(max_tokens=8).ainvoke("Hi"))
    assert again.content == answers[0].content


def check_tools() -> None:
    """A call, made by the model, carried out here, its result in the next request."""
    chat = model().bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    answer = chat.invoke("Hi")
    assert answer.tool_calls
    for call in answer.tool_calls:
        assert call["name"] == "weather"
        assert is_weather(call["args"])
    results = [weather.invoke(call) for call in answer.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    follow_up = model(max_tokens=4).bind_tools([weather])
    last = follow_up.invoke([HumanMessage("Hi"), answer, *results])
    assert last.response_metadata["finish_reason"] == "length"


def check_tools_in_a_stream() -> None:
    joined: AIMessageChunk | None = None
    for chunk in model().bind_tools([weather], tool_choice="weather").stream("Hi"):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None
    [call] = joined.tool_calls
    assert call["name"] == "weather"
    assert is_weather(call["args"])


def check_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        person = model().with_structured_output(Person, method=method).invoke("Hi")
        assert isinstance(person, Person), method


def check_structured_output_strict() -> None:
    answer = (
        model()
        .with_structured_output(Person, method="json_schema", strict=True, include_raw=True)
        .invoke("Hi")
    )
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], Person)


def check_cancel_in_a_stream() -> None:
    stream = model(max_tokens=450, extra_body={"ignore_eos": True}).stream("Hi")
    for _ in range(3):
        next(stream)
    stream.close()
    wait_until_idle()


def check_embeddings() -> None:
    """``check_embedding_ctx_length`` would count tokens with OpenAI's own tokenizer."""
    embedder = OpenAIEmbeddings(
        model=MODEL, base_url=embed_url(), api_key=key(), check_embedding_ctx_length=False
    )
    first, second, third = embedder.embed_documents(["one", "two", "one"])
    assert first == third != second
    assert embedder.embed_query("two") == second


def check_errors() -> None:
    def error_of(kind: type[openai.APIStatusError], chat: ChatOpenAI, messages: Any) -> Any:
        return raised(kind, lambda: chat.invoke(messages))

    unknown = ChatOpenAI(model="gpt-9", base_url=url(), api_key=key(), max_retries=0)
    assert error_of(openai.NotFoundError, unknown, HI).code == "model_not_found"
    assert error_of(openai.BadRequestError, model(), TOO_LONG).code == "context_length_exceeded"
    assert error_of(openai.BadRequestError, model(temperature=9), HI).param == "temperature"
    stranger = model(api_key="wrong")
    assert error_of(openai.AuthenticationError, stranger, HI).code == "invalid_api_key"


if __name__ == "__main__":
    run_checks(globals())
