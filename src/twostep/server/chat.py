"""``/v1/chat/completions``."""

from __future__ import annotations

import msgspec

from twostep.contracts.sampling import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    ThinkingBudget,
)
from twostep.server.chat_messages import check_chat_fields, tool_dicts
from twostep.server.chat_writer import ChatWriter
from twostep.server.errors import ApiError
from twostep.server.generation import Generation, Job
from twostep.server.http import HttpCall
from twostep.server.parsers.formats import ToolChoice
from twostep.server.parsers.grammar import output_grammar
from twostep.server.parsers.output_parser import OutputParser
from twostep.server.prompts import ChatPrompt, chat_prompt
from twostep.server.protocol.chat import ChatCompletionRequest, NamedToolChoice
from twostep.server.request_fields import answer_id, cache_salt, log_request, request_priority
from twostep.server.sampling import sampling_params
from twostep.server.state import ServerState


async def create_chat_completion(
    state: ServerState, call: HttpCall, request: ChatCompletionRequest
) -> None:
    """Serve one request."""
    state.check_open()
    state.check_model(request.model)
    state.check_generates()
    check_chat_fields(request)
    params = chat_params(state, request)
    params.priority = request_priority(call, request)
    prompt = await chat_prompt(state, request)
    parsing = ChatParsing(state, request, prompt)
    if parsing.is_needed and state.formats.needs_special_tokens:
        params.skip_special_tokens = False  # markers may be special tokens
    asked = params.structured_outputs
    constraint = parsing.constraint(asked)
    params.structured_outputs = parsing.bounded(
        constraint, request.thinking_token_budget, is_the_users=constraint is asked
    )
    name = answer_id("chatcmpl", call, request)
    log_request(state, name, request, params)
    writer = ChatWriter(state, request, params, name, parsing.make)
    generation = Generation(
        state,
        call,
        [Job(prompt.engine_prompt, len(prompt.token_ids), params)],
        name=name,
        cache_salt=cache_salt(request),
        param_names=param_names(request, calls_are_held=constraint is not asked),
    )
    await generation.answer(writer, stream=bool(request.stream))


def param_names(request: ChatCompletionRequest, *, calls_are_held: bool) -> dict[str, str]:
    """What the engine's parameters are called in a chat request."""
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if calls_are_held and request.tools:
        names["structured_outputs"] = "tools"
    elif request.structured_outputs is None:
        names["structured_outputs"] = "response_format"
    return names


def chat_params(state: ServerState, request: ChatCompletionRequest) -> SamplingParams:
    """The request's parameters; ApiError for what excludes each other."""
    params = sampling_params(request, state.default_params(), state.engine.input_processor.limits)
    params.output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    given = request.max_completion_tokens
    params.max_tokens = request.max_tokens if given is None else given
    if params.max_tokens == 0:
        field = "max_tokens" if given is None else "max_completion_tokens"
        raise ApiError("invalid_value", f"{field} is 0; it must be at least 1", field)
    # Log-probabilities of certain tokens take the place of the likeliest ones.
    most = 0 if request.logprob_token_ids else request.top_logprobs or 0
    params.logprobs = most if request.logprobs or request.logprob_token_ids else None
    return params


class ChatParsing:
    """Whether and how the answers to one request are searched for calls and reasoning."""

    def __init__(
        self, state: ServerState, request: ChatCompletionRequest, prompt: ChatPrompt
    ) -> None:
        self._formats = state.formats
        self._tools = tool_dicts(request.tools) or []
        self._choice = tool_choice(request)
        self._parallel = request.parallel_tool_calls is not False
        self._starts_in_reasoning = state.formats.opens_reasoning(prompt.text)
        self._tokenizer = state.engine.tokenizer
        has_tools = self._formats.format_for(self._tools, self._choice) is not None
        self.is_needed = has_tools or self._formats.reasoning_format is not None

    def constraint(self, answer: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """What the whole output is held to; ``answer`` is what the request asks of its text."""
        return output_grammar(
            self._formats,
            self._tools,
            self._choice,
            answer,
            starts_in_reasoning=self._starts_in_reasoning,
            parallel_tool_calls=self._parallel,
            special_tokens=self._tokenizer.special_tokens,
        )

    def bounded(
        self,
        constraint: StructuredOutputsParams | None,
        budget: int | None,
        *,
        is_the_users: bool,
    ) -> StructuredOutputsParams | None:
        """The constraint with a bound on reasoning; ApiError where it has no known form or place.

        ``is_the_users``: the request brought the constraint as it is.
        """
        if budget is None or budget < 0:
            return constraint
        tags = self._formats.reasoning_tags
        if tags is None:
            raise ApiError(
                "unsupported_feature",
                "thinking_token_budget: this model has no form of reasoning that is known here "
                "(--reasoning-parser names one); leave it out",
                "thinking_token_budget",
            )
        if is_the_users and constraint is not None and constraint.grammar is not None:
            raise ApiError(
                "invalid_value",
                "thinking_token_budget and a grammar exclude each other: the grammar says what the "
                "whole text is, reasoning and all",
                "thinking_token_budget",
            )
        thinking = ThinkingBudget(
            max_tokens=budget,
            start=tags.start,
            end=tags.end,
            end_token_ids=tuple(self._tokenizer.encode(tags.end, False)),
            is_thinking=self._starts_in_reasoning,
        )
        if constraint is None:
            return StructuredOutputsParams(thinking=thinking)
        return msgspec.structs.replace(constraint, thinking=thinking)

    def make(self) -> OutputParser | None:
        """The parser of one choice; None if its text is just text."""
        if not self.is_needed:
            return None
        return self._formats.make(
            self._tools,
            self._choice,
            starts_in_reasoning=self._starts_in_reasoning,
            call_ids=self._formats.new_call_id,
            parallel_tool_calls=self._parallel,
        )


def tool_choice(request: ChatCompletionRequest) -> ToolChoice:
    """The request's choice; ``auto`` with tools, else ``none``."""
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        return {"type": "function", "function": {"name": choice.function.name}}
    if choice == "required":
        return "required"
    if choice == "none" or not request.tools:
        return "none"
    return "auto"
