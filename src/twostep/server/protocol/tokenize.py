"""Structs of ``/tokenize``, ``/detokenize`` and the render endpoints."""

from __future__ import annotations

from typing import Any

import msgspec

from twostep.server.protocol.chat import ChatMessage, ToolDefinition


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text (``prompt``, or llama.cpp's ``content``) or a conversation (``messages``)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[ToolDefinition] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Their text, under vLLM's name and under llama.cpp's."""

    prompt: str
    content: str


class RenderResponse(msgspec.Struct, kw_only=True):
    """A prompt as the engine would get it."""

    prompt: str | None
    token_ids: list[int]
