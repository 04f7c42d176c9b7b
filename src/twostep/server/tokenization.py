"""``/tokenize``, ``/detokenize`` and the render endpoints."""

from __future__ import annotations

from typing import Any

from twostep.server.chat_messages import check_chat_fields, message_dicts, tool_dicts
from twostep.server.errors import ApiError, shown
from twostep.server.http import HttpCall
from twostep.server.prompts import chat_prompt, off_loop, split_prompts
from twostep.server.protocol.chat import ChatCompletionRequest
from twostep.server.protocol.completions import CompletionRequest
from twostep.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    RenderResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from twostep.server.state import ServerState


async def tokenize(state: ServerState, call: HttpCall, request: TokenizeRequest) -> None:
    """Ids of a text or a conversation, however long."""
    state.check_open()
    state.check_model(request.model)
    engine = state.engine
    text = request.content if request.prompt is None else request.prompt
    if (text is None) == (request.messages is None):
        raise ApiError(
            "missing_required_parameter" if text is None else "invalid_value",
            "give either prompt or messages",
            "prompt",
        )
    if request.messages is not None:
        ids = await _chat_ids(state, request)
    else:
        assert text is not None
        special = request.add_special_tokens is not False
        ids = await off_loop(len(text), lambda: engine.tokenizer.encode(text, special))
    spelled = None
    if request.return_token_strs or request.with_pieces:
        spelled = [engine.tokenizer.token_text(token_id) for token_id in ids]
    await call.answer_json(
        TokenizeResponse(
            count=len(ids),
            max_model_len=engine.info.max_model_len,
            tokens=ids,
            token_strs=spelled,
        )
    )


async def _chat_ids(state: ServerState, request: TokenizeRequest) -> list[int]:
    assert request.messages is not None
    messages = message_dicts(request.messages)
    kwargs = {**state.default_chat_template_kwargs, **(request.chat_template_kwargs or {})}
    prompter = state.engine.chat_prompter
    adds = request.add_generation_prompt
    if adds is None:
        adds = not request.continue_final_message
    tools = tool_dicts(request.tools)

    def render() -> tuple[str, list[int]]:
        return prompter.encode(
            messages,
            tools=tools,
            add_generation_prompt=adds,
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=kwargs,
        )

    chars = sum(len(message.get("content") or "") for message in messages)
    return (await off_loop(chars, render))[1]


async def detokenize(state: ServerState, call: HttpCall, request: DetokenizeRequest) -> None:
    """Text of ids, special tokens spelled out."""
    state.check_open()
    state.check_model(request.model)
    tokenizer = state.engine.tokenizer
    for i, token_id in enumerate(request.tokens):
        if not 0 <= token_id < tokenizer.vocab_size:
            raise ApiError(
                "invalid_value",
                f"tokens[{i}] is {shown(token_id, 40)}; ids of this model are 0 to "
                f"{tokenizer.vocab_size - 1}",
                f"tokens[{i}]",
            )
    text = tokenizer.decode(request.tokens, skip_special_tokens=False)
    await call.answer_json(DetokenizeResponse(prompt=text, content=text))


async def render_chat(state: ServerState, call: HttpCall, request: ChatCompletionRequest) -> None:
    """The prompt that a chat request would get."""
    state.check_open()
    state.check_model(request.model)
    check_chat_fields(request)
    prompt = await chat_prompt(state, request)
    await call.answer_json(RenderResponse(prompt=prompt.text, token_ids=prompt.token_ids))


async def render_completion(state: ServerState, call: HttpCall, request: CompletionRequest) -> None:
    """The prompts that a completion request would get; one answer, or a list of them."""
    state.check_open()
    state.check_model(request.model)
    tokenizer = state.engine.tokenizer
    special = request.add_special_tokens is not False
    rendered: list[Any] = []
    for prompt in split_prompts(request.prompt, state.settings.max_prompts):
        if isinstance(prompt, str):
            ids = await off_loop(
                len(prompt),
                lambda text=prompt: tokenizer.encode(text, special),  # type: ignore[misc]
            )
            rendered.append(RenderResponse(prompt=prompt, token_ids=ids))
        else:
            rendered.append(RenderResponse(prompt=None, token_ids=prompt))
    many = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
    await call.answer_json(rendered if many else rendered[0])
