"""News from the engine core, to the outputs that users get."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

from twostep.contracts.outputs import EngineCoreOutput
from twostep.contracts.results import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    RequestStateStats,
)
from twostep.contracts.sampling import RequestOutputKind
from twostep.frontend.input_processor import ProcessedRequest
from twostep.frontend.sequence_state import SequenceState, named_prompt_logprobs
from twostep.frontend.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessedOutputs:
    """What one batch of news led to."""

    request_outputs: list[RequestOutput]
    reqs_to_abort: list[str]
    """Core requests that a stop string ended: the core must be told to stop them."""


class _RequestState:
    """A request and its sequences."""

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None, now: float) -> None:
        self.request = request
        self.sequences = [
            SequenceState(
                i, request.params, request.prompt_token_ids, tokenizer, request.stop_texts
            )
            for i in range(len(request.core_requests))
        ]
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.prompt_logprobs_sent = False
        self.num_cached_tokens: int | None = None
        self.stats = RequestStateStats(arrival_time=now)
        self.preemptions = [0] * len(self.sequences)

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    def observe(self, index: int, output: EngineCoreOutput, now: float, new_tokens: int) -> None:
        """Keep the figures of the request."""
        stats = self.stats
        if new_tokens:
            stats.first_token_ts = stats.first_token_ts or now
            stats.last_token_ts = now
            stats.num_generation_tokens += new_tokens
        self.preemptions[index] = max(self.preemptions[index], output.num_preemptions)
        stats.num_preemptions = sum(self.preemptions)
        if output.prefill_stats is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens

    def make_output(self, completions: list[CompletionOutput]) -> RequestOutput:
        request = self.request
        prompt_logprobs = self.prompt_logprobs
        if request.params.output_kind == RequestOutputKind.DELTA and self.prompt_logprobs_sent:
            prompt_logprobs = None
        self.prompt_logprobs_sent = self.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=completions,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=dataclasses.replace(self.stats),
        )


class OutputProcessor:
    """Detokenises, looks for stop strings, merges the sequences of a request.

    Owns the output state of every request between ``add_request`` and its last output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stream_interval: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``stream_interval``: tokens between outputs of a stream; requests may ask for more."""
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._clock = clock
        self._states: dict[str, tuple[_RequestState, int]] = {}
        """By core request: its request and the index of its sequence."""
        self._core_ids: dict[str, list[str]] = {}
        """By the user's id: the core requests that go on."""

    @property
    def num_unfinished_requests(self) -> int:
        """Core requests that have not ended."""
        return len(self._states)

    def add_request(self, request: ProcessedRequest) -> None:
        """Expect news of this request."""
        state = _RequestState(request, self._tokenizer, self._clock())
        for index, core_request in enumerate(request.core_requests):
            self._states[core_request.request_id] = (state, index)
            self._core_ids.setdefault(request.request_id, []).append(core_request.request_id)

    def process_outputs(self, outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Take the core's news in order; those of unknown (finished, aborted) ids are ignored."""
        now = self._clock()
        done = ProcessedOutputs([], [])
        for output in outputs:
            found = self._states.get(output.request_id)
            if found is not None:
                self._process(output, *found, now, done)
        return done

    def _process(
        self,
        output: EngineCoreOutput,
        state: _RequestState,
        index: int,
        now: float,
        done: ProcessedOutputs,
    ) -> None:
        sequence = state.sequences[index]
        before = len(sequence.token_ids)
        sequence.update(output)
        state.observe(index, output, now, len(sequence.token_ids) - before)
        if output.new_prompt_logprobs is not None and state.prompt_logprobs is None:
            state.prompt_logprobs = named_prompt_logprobs(
                output.new_prompt_logprobs, state.request.prompt_token_ids, self._tokenizer
            )
        if sequence.finished:
            self._forget(output.request_id, state)
            if sequence.stopped_by_text and output.finish_reason is None:
                done.reqs_to_abort.append(output.request_id)
        if (made := self._output_now(state, sequence, first=before == 0)) is not None:
            done.request_outputs.append(made)

    def _output_now(
        self, state: _RequestState, sequence: SequenceState, *, first: bool
    ) -> RequestOutput | None:
        params = state.request.params
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            if not state.finished:
                return None
            return state.make_output(
                [each.take_output(params.output_kind) for each in state.sequences]
            )
        interval = max(self._stream_interval, params.stream_interval or 1)
        due = sequence.num_unsent_tokens >= interval or (first and sequence.num_unsent_tokens > 0)
        if not (due or sequence.finished):
            return None
        return state.make_output([sequence.take_output(params.output_kind)])

    def abort_requests(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """End requests by the user's ids (or core ids): last outputs, and what the core must stop.

        Unknown ids are ignored.
        """
        done = ProcessedOutputs([], [])
        for request_id in request_ids:
            known = [request_id] if request_id in self._states else []
            for core_id in list(self._core_ids.get(request_id, known)):
                state, index = self._states[core_id]
                sequence = state.sequences[index]
                sequence.abort()
                self._forget(core_id, state)
                done.reqs_to_abort.append(core_id)
                if (made := self._output_now(state, sequence, first=False)) is not None:
                    done.request_outputs.append(made)
        return done

    def _forget(self, core_id: str, state: _RequestState) -> None:
        del self._states[core_id]
        siblings = self._core_ids[state.request.request_id]
        siblings.remove(core_id)
        if not siblings:
            del self._core_ids[state.request.request_id]


def merge_request_outputs(
    older: RequestOutput, newer: RequestOutput, kind: RequestOutputKind
) -> RequestOutput:
    """One output for two that a slow reader has not fetched: nothing of a DELTA is lost."""
    if kind != RequestOutputKind.DELTA:
        untouched = [o for o in older.outputs if all(o.index != n.index for n in newer.outputs)]
        outputs = sorted([*untouched, *newer.outputs], key=lambda output: output.index)
        return dataclasses.replace(newer, outputs=outputs)
    merged = {output.index: output for output in older.outputs}
    for output in newer.outputs:
        before = merged.get(output.index)
        merged[output.index] = output if before is None else _join_deltas(before, output)
    return dataclasses.replace(
        newer,
        outputs=[merged[index] for index in sorted(merged)],
        prompt_logprobs=older.prompt_logprobs or newer.prompt_logprobs,
    )


def _join_deltas(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    return dataclasses.replace(
        newer,
        text=older.text + newer.text,
        token_ids=[*older.token_ids, *newer.token_ids],
        logprobs=_join_logprobs(older.logprobs, newer.logprobs),
    )


def _join_logprobs(
    older: Sequence[dict[int, Logprob]] | None, newer: Sequence[dict[int, Logprob]] | None
) -> list[dict[int, Logprob]] | None:
    if older is None and newer is None:
        return None
    return [*(older or []), *(newer or [])]
