"""The messages and tools of a chat request, checked and as templates take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from twostep.server.errors import ApiError, shown
from twostep.server.protocol.chat import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    MessageToolCall,
    NamedToolChoice,
    ToolDefinition,
)

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MEDIA_PARTS = (
    "image_url",
    "input_image",
    "image",
    "input_audio",
    "audio_url",
    "video_url",
    "file",
)
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def message_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages with text contents and without what is absent. ApiError names message and part."""
    if not messages:
        raise ApiError("invalid_value", "messages is empty; give at least one message", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise ApiError(
            "invalid_value",
            f"{where}.role is {shown(message.role)!r}; it must be one of {', '.join(ROLES)}",
            f"{where}.role",
        )
    clean: dict[str, Any] = {"role": message.role}
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    content = message.content
    if isinstance(content, list):
        texts = []
        for i, part in enumerate(content):
            kind, text = _part(part, f"{where}.content[{i}]")
            if kind == "thinking":
                reasoning = text if reasoning is None else reasoning + "\n" + text
            else:
                texts.append(text)
        content = "\n".join(texts)
    if content is None:
        content = message.refusal
    clean["content"] = content
    if reasoning is not None:
        clean["reasoning"] = clean["reasoning_content"] = reasoning
    if message.tool_calls:
        clean["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            clean[name] = value
    return clean


def _part(part: str | ContentPart, where: str) -> tuple[str, str]:
    """(kind, text) of a part of a content."""
    if isinstance(part, str):
        return "text", part
    if part.type in _MEDIA_PARTS:
        raise ApiError(
            "unsupported_feature",
            f"{where} is of type {part.type}; this model reads text only",
            where,
        )
    if part.type not in ("text", "input_text", "output_text", "refusal", "thinking"):
        raise ApiError(
            "invalid_value",
            f"{where}.type is {shown(part.type)!r}; it must be text",
            f"{where}.type",
        )
    field = part.type if part.type in ("refusal", "thinking") else "text"
    text = getattr(part, field)
    if text is None:
        path = f"{where}.{field}"
        raise ApiError("missing_required_parameter", f"{path} is required and was not given", path)
    return part.type, text


def _tool_call(call: MessageToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or "{}"}
    clean: dict[str, Any] = {"type": call.type or "function", "function": function}
    return clean if call.id is None else {"id": call.id, **clean}


def tool_dicts(tools: Sequence[ToolDefinition] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them; ApiError for those that cannot be called."""
    if tools is None:
        return None
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: ToolDefinition, where: str) -> dict[str, Any]:
    if tool.type != "function":
        raise ApiError(
            "unsupported_feature",
            f"{where}.type is {shown(tool.type)!r}; only functions are supported",
            f"{where}.type",
        )
    if tool.function is None:
        path = f"{where}.function"
        raise ApiError("missing_required_parameter", f"{path} is required and was not given", path)
    if not _FUNCTION_NAME.fullmatch(tool.function.name):
        raise ApiError(
            "invalid_value",
            f"{where}.function.name is {shown(tool.function.name)!r}; it must be 1 to 64 letters, "
            "digits, _ and -",
            f"{where}.function.name",
        )
    _check_parameters(tool.function.parameters, f"{where}.function.parameters")
    function = {
        name: value
        for name, value in msgspec.structs.asdict(tool.function).items()
        if value is not None
    }
    return {"type": "function", "function": function}


def _check_parameters(schema: dict[str, Any] | None, where: str) -> None:
    """Raise ApiError for a schema whose shape is none; what it says is the grammar's matter."""
    for name, kind, wanted in (("properties", dict, "an object"), ("required", list, "a list")):
        value = None if schema is None else schema.get(name)
        if value is not None and not isinstance(value, kind):
            path = f"{where}.{name}"
            raise ApiError("invalid_schema", f"{path} must be {wanted}", path)


def check_chat_fields(request: ChatCompletionRequest) -> None:
    """Raise ApiError for fields that exclude each other or ask for what is not built."""
    if request.top_logprobs and not request.logprobs:
        raise ApiError("invalid_value", "top_logprobs needs logprobs: true; set it", "top_logprobs")
    if request.modalities and any(each != "text" for each in request.modalities):
        raise ApiError("unsupported_feature", "this model writes text only", "modalities")
    if request.add_generation_prompt and request.continue_final_message:
        raise ApiError(
            "invalid_value",
            "add_generation_prompt and continue_final_message exclude each other",
            "continue_final_message",
        )
    effort = request.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        raise ApiError(
            "invalid_value",
            f"reasoning_effort is {shown(effort)!r}; it must be one of {', '.join(EFFORTS)}",
            "reasoning_effort",
        )
    _check_tool_choice(request)


def _check_tool_choice(request: ChatCompletionRequest) -> None:
    tools, choice = request.tools, request.tool_choice
    if tools is not None and not tools:
        raise ApiError("invalid_value", "tools is an empty list; leave it out", "tools")
    if choice is None or choice == "none":
        return
    if isinstance(choice, str) and choice not in ("auto", "required"):
        raise ApiError(
            "invalid_value",
            f"tool_choice is {shown(choice)!r}; it must be none, auto, required or "
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    if not tools:
        raise ApiError("invalid_value", "tool_choice needs tools; give them", "tool_choice")
    if isinstance(choice, NamedToolChoice):
        names = [tool.function.name for tool in tools if tool.function is not None]
        if choice.function.name not in names:
            raise ApiError(
                "invalid_value",
                f"tool_choice names {shown(choice.function.name)!r}, which is none of the tools",
                "tool_choice.function.name",
            )
