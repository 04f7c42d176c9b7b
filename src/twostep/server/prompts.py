"""What a request wants continued, as prompts for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from twostep.contracts.sampling import SamplingParams
from twostep.frontend.chat_prompt import ChatPrompter
from twostep.frontend.chat_template import ChatTemplate
from twostep.frontend.input_processor import PromptType
from twostep.server.chat_messages import message_dicts, tool_dicts
from twostep.server.errors import ApiError, shown
from twostep.server.protocol.chat import ChatCompletionRequest
from twostep.server.protocol.completions import CompletionRequest
from twostep.server.state import ServerState

T = TypeVar("T")

LONG_TEXT_CHARS = 8192
"""Longer texts are tokenised or rendered in a thread, so that other requests go on meanwhile."""
CHARS_PER_TOKEN = 4
"""For the estimate of a text's tokens before it is tokenised."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt."""

    engine_prompt: PromptType
    num_tokens: int
    """An estimate if the prompt is still text."""


async def off_loop(num_chars: int, function: Callable[[], T]) -> T:
    """``function()``, in a thread if the text it works on is long."""
    if num_chars <= LONG_TEXT_CHARS:
        return function()
    return await asyncio.to_thread(function)


# -- completions --------------------------------------------------------------------------------


async def completion_prompts(
    state: ServerState, request: CompletionRequest, params: SamplingParams
) -> list[Prompt]:
    """All prompts of the request, in order. Raises ApiError or InvalidRequestError."""
    return [
        await _completion_prompt(state, request, params, prompt)
        for prompt in split_prompts(request.prompt, state.settings.max_prompts)
    ]


def split_prompts(prompt: Any, most: int, field: str = "prompt") -> list[str | list[int]]:
    """Text, a list of texts, ids, or a list of lists of ids, as a list of prompts.

    ``field``: what clients call them.
    """
    if prompt is None:
        raise ApiError(
            "missing_required_parameter", f"{field} is required and was not given", field
        )
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError("invalid_value", f"{field} is an empty list; give at least one", field)
    kind = type(prompt[0])
    for i, each in enumerate(prompt):
        if type(each) is not kind:
            raise ApiError(
                "invalid_type",
                f"{field}[{i}] is of another type than {field}[0]",
                f"{field}[{i}]",
            )
    if kind is int:
        return [prompt]
    if len(prompt) > most:
        raise ApiError(
            "invalid_value",
            f"{field} has {len(prompt)} entries; at most {most} are allowed",
            field,
        )
    for i, each in enumerate(prompt):
        if not each:
            raise ApiError("invalid_value", f"{field}[{i}] is empty", f"{field}[{i}]")
    return list(prompt)


async def _completion_prompt(
    state: ServerState,
    request: CompletionRequest,
    params: SamplingParams,
    prompt: str | list[int],
) -> Prompt:
    if prompt == "":
        raise ApiError("invalid_value", "prompt is empty; give at least one token", "prompt")
    text = prompt if isinstance(prompt, str) else None
    special = request.add_special_tokens is not False
    if text is not None and special and request.truncate_prompt_tokens is None:
        return Prompt(text, max(1, len(text) // CHARS_PER_TOKEN))
    ids = prompt if isinstance(prompt, list) else await _tokenize(state, prompt, special)
    if request.truncate_prompt_tokens is not None:
        ids, text = truncated(state, request, ids, params.max_tokens), None
    if text is None:
        return Prompt({"prompt_token_ids": ids}, len(ids))
    return Prompt({"prompt": text, "prompt_token_ids": ids}, len(ids))


async def _tokenize(state: ServerState, text: str, add_special_tokens: bool) -> list[int]:
    tokenizer = state.engine.tokenizer
    return await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens))


def truncated(
    state: ServerState,
    request: CompletionRequest | ChatCompletionRequest,
    ids: list[int],
    max_tokens: int | None,
) -> list[int]:
    """The last (``truncation_side`` left, the default) or first ids of a prompt.

    -1 keeps what leaves room for the answer.
    """
    keep = request.truncate_prompt_tokens
    assert keep is not None
    side = request.truncation_side or "left"
    if side not in ("left", "right"):
        raise ApiError(
            "invalid_value",
            f"truncation_side is {shown(side)!r}; it must be left or right",
            "truncation_side",
        )
    if keep == -1:
        keep = max(1, state.engine.info.max_model_len - max(1, max_tokens or 1))
    if keep < 1:
        raise ApiError(
            "invalid_value",
            f"truncate_prompt_tokens is {shown(keep)}; it must be -1 or at least 1",
            "truncate_prompt_tokens",
        )
    return ids[-keep:] if side == "left" else ids[:keep]


# -- chat ---------------------------------------------------------------------------------------


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation, rendered."""

    text: str
    token_ids: list[int]

    @property
    def engine_prompt(self) -> Mapping[str, Any]:
        """As the engine takes it."""
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


async def chat_prompt(state: ServerState, request: ChatCompletionRequest) -> ChatPrompt:
    """The conversation through the chat template. Raises ApiError or InvalidRequestError."""
    messages = message_dicts(request.messages)
    tools = None if request.tool_choice == "none" else tool_dicts(request.tools)
    chars = sum(len(message.get("content") or "") for message in messages)
    for document in request.documents or ():
        chars += sum(len(text) for text in document.values() if isinstance(text, str))
    kwargs = template_kwargs(state, request)
    prompter = _prompter(state, request)

    def render() -> tuple[str, list[int]]:
        return prompter.encode(
            messages,
            tools=tools,
            documents=request.documents,
            add_generation_prompt=_adds_generation_prompt(request),
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=kwargs,
        )

    text, ids = await off_loop(chars, render)
    if request.truncate_prompt_tokens is not None:
        most = request.max_completion_tokens or request.max_tokens
        ids = truncated(state, request, ids, most)
    return ChatPrompt(text, ids)


def _adds_generation_prompt(request: ChatCompletionRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


def template_kwargs(state: ServerState, request: ChatCompletionRequest) -> dict[str, Any]:
    """Variables for the template: the server's, the request's, and what the effort implies."""
    kwargs = {**state.default_chat_template_kwargs, **(request.chat_template_kwargs or {})}
    effort = request.reasoning_effort
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        kwargs.setdefault("enable_thinking", effort != "none")
    return kwargs


def _prompter(state: ServerState, request: ChatCompletionRequest) -> ChatPrompter:
    engine = state.engine
    if request.chat_template is None:
        return engine.chat_prompter
    if not state.settings.trust_request_chat_template:
        raise ApiError(
            "unsupported_feature",
            "this server takes no chat templates from requests "
            "(--trust-request-chat-template allows it); leave chat_template out",
            "chat_template",
        )
    tokenizer = engine.tokenizer
    template = ChatTemplate(request.chat_template, tokenizer.special.by_name)
    return ChatPrompter(tokenizer, template)
