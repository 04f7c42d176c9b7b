"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from twostep.contracts.results import CompletionOutput, Logprob, RequestOutput
from twostep.contracts.sampling import RequestOutputKind, SamplingParams
from twostep.server.errors import ApiError
from twostep.server.generation import Generation, Job
from twostep.server.http import HttpCall
from twostep.server.logprobs import LogprobNames, prompt_logprobs, shown_logprobs
from twostep.server.prompts import completion_prompts
from twostep.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from twostep.server.request_fields import answer_id, cache_salt, log_request, request_priority
from twostep.server.sampling import sampling_params
from twostep.server.sse import DONE, ChunkTemplate, event
from twostep.server.state import ServerState
from twostep.server.usage import UsageCounter, shown_reasons

DEFAULT_MAX_TOKENS = 16


async def create_completion(state: ServerState, call: HttpCall, request: CompletionRequest) -> None:
    """Serve one request."""
    state.check_open()
    state.check_model(request.model)
    state.check_generates()
    params = completion_params(state, request)
    params.priority = request_priority(call, request)
    prompts = await completion_prompts(state, request, params)
    name = answer_id("cmpl", call, request)
    log_request(state, name, request, params)
    writer = CompletionWriter(state, request, params, name, len(prompts))
    generation = Generation(
        state,
        call,
        [Job(prompt.engine_prompt, prompt.num_tokens, params) for prompt in prompts],
        name=name,
        cache_salt=cache_salt(request),
        param_names={} if request.structured_outputs else {"structured_outputs": "response_format"},
    )
    await generation.answer(writer, stream=bool(request.stream))


def completion_params(state: ServerState, request: CompletionRequest) -> SamplingParams:
    """The request's parameters; ApiError for what excludes each other."""
    if request.suffix:
        raise ApiError(
            "unsupported_feature",
            "suffix is not supported: the model knows no filling in of the middle",
            "suffix",
        )
    if request.thinking_token_budget is not None and request.thinking_token_budget >= 0:
        raise ApiError(
            "unsupported_feature",
            "thinking_token_budget is for conversations: a plain text has no reasoning that is "
            "told apart; leave it out",
            "thinking_token_budget",
        )
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(
            "invalid_value", "best_of is not supported unless it equals n; leave it out", "best_of"
        )
    params = sampling_params(request, state.default_params(), state.engine.input_processor.limits)
    params.output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    params.max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if params.max_tokens == 0 and request.echo:
        # A forward pass always gives one token: it is computed and not told.
        params.max_tokens = 1
    params.logprobs = 0 if request.logprob_token_ids else request.logprobs
    if request.echo and request.logprobs is not None:
        params.prompt_logprobs = request.logprobs
    return params


class CompletionWriter:
    """Outputs to chunks, or to the one document."""

    def __init__(
        self,
        state: ServerState,
        request: CompletionRequest,
        params: SamplingParams,
        name: str,
        num_prompts: int,
    ) -> None:
        self._request = request
        self._params = params
        self._echo = bool(request.echo)
        self._scores_only = self._echo and request.max_tokens == 0
        self._counter = UsageCounter(num_prompts)
        self._tokenizer = state.engine.tokenizer
        self._names = LogprobNames(self._tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._head: dict[str, Any] = {
            "id": name,
            "object": "text_completion",
            "created": state.now(),
            "model": state.model_name,
            "system_fingerprint": state.system_fingerprint,
        }
        options = request.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._is_plain = (
            params.logprobs is None and not self._usage_always and not request.return_token_ids
        )
        """Whether most chunks have nothing but text."""
        self._prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}
        """By prompt; a stream tells them only once."""
        self._offsets: dict[int, int] = {}
        """By choice: where the text of its next token begins."""
        self._templates: dict[int, ChunkTemplate] = {}
        """By choice: a chunk with nothing but text."""

    # -- the whole answer --------------------------------------------------------------------

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See AnswerWriter."""
        choices = []
        for index, output in enumerate(outputs):
            self._count(index, output)
            for completion in output.outputs:
                choices.append(self._choice(index, output, completion))
        return msgspec.json.encode(
            CompletionResponse(
                **self._head,
                choices=choices,
                usage=self._counter.usage(),
                timings=self._counter.timings(),
            )
        )

    def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        token_ids, text = completion.token_ids, completion.text
        if self._scores_only:
            token_ids, text = [], ""
        if self._echo:
            text = self._prompt_text(output) + text
        finish_reason, stop_reason = shown_reasons(completion.finish_reason, completion.stop_reason)
        choice = CompletionChoice(
            index=index * self._params.n + completion.index,
            text=text,
            logprobs=self._logprobs(0, index, output, completion, first=True)[0],
            finish_reason="length" if self._scores_only else finish_reason,
            stop_reason=None if self._scores_only else stop_reason,
        )
        if self._request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs) or []
        if self._request.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = token_ids, output.prompt_token_ids
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(
        self,
        offset: int,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        *,
        first: bool,
    ) -> tuple[CompletionLogprobs | None, int]:
        """Entries of this output's tokens, whose text begins at ``offset``, and where it ends.

        With ``first`` and echo the prompt's come before them.
        """
        if self._params.logprobs is None:
            return None, offset
        most = shown_logprobs(self._request.logprobs, self._request.logprob_token_ids)
        ids: list[int] = []
        found: list[dict[int, Logprob] | None] = []
        if first and self._echo:
            ids += output.prompt_token_ids
            found += self._prompt_logprobs.get(index) or [None] * len(ids)
        if not self._scores_only:
            ids += completion.token_ids
            found += completion.logprobs or []
        return self._names.completion(ids, found, most, offset)

    def _count(self, index: int, output: RequestOutput) -> None:
        self._counter.add(index, output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        if self._scores_only:
            self._counter.num_completion_tokens = 0

    # -- the stream --------------------------------------------------------------------------

    def events(self, index: int, output: RequestOutput) -> bytes:
        """See AnswerWriter."""
        self._count(index, output)
        data = b""
        for completion in output.outputs:
            data += self._chunk(index, output, completion)
        return data

    def _chunk(self, index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        choice = index * self._params.n + completion.index
        first = choice not in self._templates
        if first:
            self._templates[choice] = ChunkTemplate(self._plain_chunk(choice, _MARKER), _MARKER)
        if self._is_plain and completion.finish_reason is None and not (first and self._echo):
            return self._templates[choice].fill(completion.text) if completion.text else b""
        return self._full_chunk(choice, index, output, completion, first=first)

    def _plain_chunk(self, choice: int, text: str) -> dict[str, Any]:
        one = {"index": choice, "text": text, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [one]}
        return {**chunk, "usage": None} if self._usage_at_end else chunk

    def _full_chunk(
        self,
        choice: int,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        *,
        first: bool,
    ) -> bytes:
        text = "" if self._scores_only else completion.text
        if first and self._echo:
            text = self._prompt_text(output) + text
        chunk = self._plain_chunk(choice, text)
        one = chunk["choices"][0]
        one["logprobs"], self._offsets[choice] = self._logprobs(
            self._offsets.get(choice, 0), index, output, completion, first=first
        )
        if completion.finish_reason is not None:
            reasons = shown_reasons(completion.finish_reason, completion.stop_reason)
            one["finish_reason"], one["stop_reason"] = reasons
            if self._scores_only:
                one["finish_reason"], one["stop_reason"] = "length", None
        if self._request.return_token_ids:
            one["token_ids"] = [] if self._scores_only else completion.token_ids
            if first:
                one["prompt_token_ids"] = output.prompt_token_ids
        if self._usage_always:
            chunk["usage"] = self._counter.usage()
        return event(chunk)

    def last_events(self) -> bytes:
        """See AnswerWriter."""
        if not self._usage_at_end:
            return DONE
        usage = {
            **self._head,
            "choices": [],
            "usage": self._counter.usage(),
            "timings": self._counter.timings(),
        }
        return event(usage) + DONE


_MARKER = "\ue000text\ue000"
"""Stands for the text while a chunk is made in advance."""
