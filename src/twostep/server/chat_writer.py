"""Outputs of a chat request, to chunks or to the one document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from twostep.contracts.results import CompletionOutput, RequestOutput
from twostep.contracts.sampling import SamplingParams
from twostep.server.logprobs import LogprobNames, prompt_logprobs, shown_logprobs
from twostep.server.parsers.events import Event, Reasoning, Text, ToolArguments, ToolStart
from twostep.server.parsers.output_parser import OutputParser
from twostep.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatTokenLogprob,
    NamedToolChoice,
    ToolCall,
    ToolCallFunction,
)
from twostep.server.sse import DONE, ChunkTemplate, event
from twostep.server.state import ServerState
from twostep.server.usage import UsageCounter, shown_reasons

MakeParser = Callable[[], OutputParser | None]


class _Choice:
    """One answer as it grows."""

    def __init__(self, parser: OutputParser | None) -> None:
        self.parser = parser
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.template: ChunkTemplate | None = None
        """A chunk with nothing but text; None until the first chunk was sent."""
        self.logprobs: list[ChatTokenLogprob] = []
        """Of tokens whose text is still held back."""
        self.token_ids: list[int] = []
        """Likewise."""

    def parse(self, completion: CompletionOutput) -> list[Event]:
        """The events of new text, and with its end those that were held back."""
        text = completion.text
        if self.parser is None:
            return [Text(text)] if text else []
        events = self.parser.feed(text) if text else []
        if completion.finish_reason is not None:
            events = [*events, *self.parser.finish()]
        return events

    def take(self, found: Event) -> None:
        """Add an event to the whole answer."""
        if isinstance(found, Text):
            self.content.append(found.text)
        elif isinstance(found, Reasoning):
            self.reasoning.append(found.text)
        elif isinstance(found, ToolStart):
            function = ToolCallFunction(name=found.name, arguments="")
            self.calls.append(ToolCall(id=found.id, function=function))
        else:
            self.calls[found.index].function.arguments += found.text


class ChatWriter:
    """See AnswerWriter."""

    def __init__(
        self,
        state: ServerState,
        request: ChatCompletionRequest,
        params: SamplingParams,
        name: str,
        make_parser: MakeParser,
    ) -> None:
        self._request = request
        self._tokenizer = state.engine.tokenizer
        self._with_logprobs = params.logprobs is not None
        self._names = LogprobNames(self._tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._counter = UsageCounter(1)
        self._choices = [_Choice(make_parser()) for _ in range(params.n)]
        self._shows_reasoning = request.include_reasoning is not False
        self._is_named = isinstance(request.tool_choice, NamedToolChoice)
        self._head: dict[str, Any] = {
            "id": name,
            "object": "chat.completion",
            "created": state.now(),
            "model": state.model_name,
            "system_fingerprint": state.system_fingerprint,
        }
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        options = request.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._echoed = _last_assistant_text(request) if request.echo else ""

    # -- the whole answer --------------------------------------------------------------------

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See AnswerWriter."""
        [output] = outputs
        self._counter.add(0, output)
        choices = [self._answer(completion) for completion in output.outputs]
        self._count_reasoning()
        response = ChatCompletionResponse(
            **self._head,
            choices=choices,
            usage=self._counter.usage(),
            timings=self._counter.timings(),
        )
        if self._request.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(output.prompt_logprobs) or []
        if self._request.return_token_ids:
            response.prompt_token_ids = output.prompt_token_ids
        return msgspec.json.encode(response)

    def _answer(self, completion: CompletionOutput) -> ChatChoice:
        choice = self._choices[completion.index]
        for found in choice.parse(completion):
            choice.take(found)
        content = self._echoed + "".join(choice.content)
        message = AnswerMessage(content=None if choice.calls and not content else content)
        if choice.reasoning and self._shows_reasoning:
            message.reasoning = message.reasoning_content = "".join(choice.reasoning)
        if choice.calls:
            message.tool_calls = choice.calls
        finish_reason, stop_reason = self._reasons(choice, completion)
        answer = ChatChoice(
            index=completion.index,
            message=message,
            logprobs=None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        hidden = bool(choice.reasoning) and not self._shows_reasoning
        if self._with_logprobs:
            answer.logprobs = ChatLogprobs(content=[] if hidden else self._logprobs(completion))
        if self._request.return_token_ids:
            answer.token_ids = [] if hidden else completion.token_ids
        return answer

    def _reasons(
        self, choice: _Choice, completion: CompletionOutput
    ) -> tuple[str | None, int | str | None]:
        reason, stop_reason = shown_reasons(completion.finish_reason, completion.stop_reason)
        if reason == "stop" and choice.calls and not self._is_named:
            return "tool_calls", stop_reason
        return reason, stop_reason

    def _logprobs(self, completion: CompletionOutput) -> list[ChatTokenLogprob]:
        most = shown_logprobs(self._request.top_logprobs, self._request.logprob_token_ids)
        return self._names.chat(completion.token_ids, completion.logprobs or [], most)

    def _count_reasoning(self) -> None:
        """Tokens of reasoning: its text's, as a parser sees text and not tokens."""
        count = 0
        for choice in self._choices:
            if choice.reasoning:
                count += len(self._tokenizer.encode("".join(choice.reasoning), False))
        self._counter.num_reasoning_tokens = count

    # -- the stream --------------------------------------------------------------------------

    def events(self, index: int, output: RequestOutput) -> bytes:
        """See AnswerWriter."""
        self._counter.add(0, output)
        data = b""
        for completion in output.outputs:
            data += self._chunks(output, completion)
        return data

    def _chunks(self, output: RequestOutput, completion: CompletionOutput) -> bytes:
        choice = self._choices[completion.index]
        data = b""
        if choice.template is None:
            data += self._first_chunk(output, completion.index, choice)
            assert choice.template is not None
        self._hold_token_facts(choice, completion)
        for found in choice.parse(completion):
            data += self._event_chunk(completion.index, choice, choice.template, found)
        if completion.finish_reason is not None:
            data += self._last_chunk(choice, completion)
        return data

    def _first_chunk(self, output: RequestOutput, index: int, choice: _Choice) -> bytes:
        choice.template = ChunkTemplate(self._chunk(index, {"content": _MARKER}), _MARKER)
        chunk = self._chunk(index, {"role": "assistant", "content": ""})
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        data = event(chunk)
        if self._echoed:
            data += choice.template.fill(self._echoed)
        return data

    def _hold_token_facts(self, choice: _Choice, completion: CompletionOutput) -> None:
        if self._with_logprobs:
            choice.logprobs += self._logprobs(completion)
        if self._request.return_token_ids:
            choice.token_ids += completion.token_ids

    def _event_chunk(
        self, index: int, choice: _Choice, template: ChunkTemplate, found: Event
    ) -> bytes:
        if isinstance(found, Text):
            if choice.logprobs or choice.token_ids or self._usage_always:
                return event(self._with_token_facts(index, choice, {"content": found.text}))
            return template.fill(found.text)
        if isinstance(found, Reasoning):
            choice.reasoning.append(found.text)
            if not self._shows_reasoning:
                choice.logprobs, choice.token_ids = [], []
                return b""
            delta = {"reasoning": found.text, "reasoning_content": found.text}
            return event(self._with_token_facts(index, choice, delta))
        choice.take(found)
        return event(self._chunk(index, {"tool_calls": [_tool_call_delta(found)]}))

    def _last_chunk(self, choice: _Choice, completion: CompletionOutput) -> bytes:
        chunk = self._with_token_facts(completion.index, choice, {})
        reasons = self._reasons(choice, completion)
        one = chunk["choices"][0]
        one["finish_reason"], one["stop_reason"] = reasons
        return event(chunk)

    def _with_token_facts(
        self, index: int, choice: _Choice, delta: dict[str, Any]
    ) -> dict[str, Any]:
        """A chunk with what is known of the tokens since the last one."""
        chunk = self._chunk(index, delta)
        one = chunk["choices"][0]
        if choice.logprobs:
            one["logprobs"] = {"content": choice.logprobs}
        if self._request.return_token_ids:
            one["token_ids"] = choice.token_ids
        choice.logprobs, choice.token_ids = [], []
        return chunk

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        one = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk: dict[str, Any] = {**self._chunk_head, "choices": [one]}
        if self._usage_always:
            chunk["usage"] = self._counter.usage()
        elif self._usage_at_end:
            chunk["usage"] = None
        return chunk

    def last_events(self) -> bytes:
        """See AnswerWriter."""
        if not self._usage_at_end:
            return DONE
        self._count_reasoning()
        usage = {
            **self._chunk_head,
            "choices": [],
            "usage": self._counter.usage(),
            "timings": self._counter.timings(),
        }
        return event(usage) + DONE


def _tool_call_delta(found: ToolStart | ToolArguments) -> dict[str, Any]:
    if isinstance(found, ToolStart):
        function = {"name": found.name, "arguments": ""}
        return {"index": found.index, "id": found.id, "type": "function", "function": function}
    return {"index": found.index, "function": {"arguments": found.text}}


def _last_assistant_text(request: ChatCompletionRequest) -> str:
    """The text that an echoed answer goes on from."""
    last = request.messages[-1]
    if last.role != "assistant" or not isinstance(last.content, str):
        return ""
    return last.content


_MARKER = "\ue000text\ue000"
"""Stands for the text while a chunk is made in advance."""
