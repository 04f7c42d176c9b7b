"""Structs of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

import msgspec

from twostep.server.protocol.common import SamplingFields, Timings, Usage


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message. Text only: models that see or hear are not built."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """What a model called. ``arguments`` is JSON text (an object is accepted)."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A call in an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None
    index: int | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool; ``function`` is the only type."""

    type: str
    function: FunctionDefinition | None = None


class NamedFunction(msgspec.Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """The one tool to call."""

    function: NamedFunction
    type: str | None = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """A conversation to be answered."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    user: str | None = None


class TokenLogprob(msgspec.Struct, kw_only=True):
    """One candidate."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, kw_only=True):
    """The chosen token and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One entry for each token."""

    content: list[ChatTokenLogprob]


class ToolCallFunction(msgspec.Struct, kw_only=True):
    """What to call, with JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model wants."""

    id: str
    function: ToolCallFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The model's turn."""

    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """All answers."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
