"""News from the engine core, to the outputs that users get."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import msgspec.structs

from twostep.contracts.outputs import EngineCoreOutput, PrefillStats
from twostep.contracts.request import FinishReason
from twostep.contracts.results import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    RequestStateStats,
)
from twostep.contracts.sampling import RequestOutputKind
from twostep.contracts.stats import FinishedRequestStats, IterationStats
from twostep.frontend.embedding import finish_embedding
from twostep.frontend.input_processor import ProcessedRequest
from twostep.frontend.sequence_state import SequenceState, named_prompt_logprobs
from twostep.frontend.tokenizer import Tokenizer

OutputSink = Callable[[RequestOutput], None]
"""Where the outputs of one request go."""


class ProcessedOutputs(msgspec.Struct):
    """What one batch of news led to."""

    request_outputs: list[RequestOutput] = []
    """Of requests without a sink of their own."""
    reqs_to_abort: list[str] = []
    """Core requests that a stop string ended: the core must be told to stop them."""
    ended: list[str] = []
    """Core requests that have ended, for whatever reason."""
    finished: list[FinishedRequestStats] = []
    """Their figures, if somebody wants them."""


class SequenceTimes(msgspec.Struct):
    """When things happened to one sequence; 0 = not yet."""

    first_token: float = 0.0
    last_token: float = 0.0
    prefill: PrefillStats | None = None
    """What the core told with the first output."""


class _RequestState:
    """A request and its sequences."""

    def __init__(
        self,
        request: ProcessedRequest,
        tokenizer: Tokenizer | None,
        now: float,
        sink: OutputSink | None,
        stream_interval: int,
    ) -> None:
        self.request = request
        self.sink = sink
        kind = request.params.output_kind
        self.is_delta = kind == RequestOutputKind.DELTA
        self.is_final_only = kind == RequestOutputKind.FINAL_ONLY
        self.stream_interval = max(stream_interval, request.params.stream_interval or 1)
        self.sequences = [
            SequenceState(
                i, request.params, request.prompt_token_ids, tokenizer, request.stop_texts
            )
            for i in range(len(request.core_requests))
        ]
        self.num_unfinished = len(self.sequences)
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.prompt_logprobs_sent = False
        self.num_cached_tokens: int | None = None
        self.embedding: list[float] | None = None
        self.stats = RequestStateStats(arrival_time=now)
        self.preemptions = [0] * len(self.sequences)
        self.times = [SequenceTimes() for _ in self.sequences]

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return self.num_unfinished == 0

    def observe(self, index: int, output: EngineCoreOutput, now: float, new_tokens: int) -> None:
        """Keep the figures of the request."""
        stats = self.stats
        if new_tokens:
            stats.first_token_ts = stats.first_token_ts or now
            stats.last_token_ts = now
            stats.num_generation_tokens += new_tokens
        if output.num_preemptions > self.preemptions[index]:
            self.preemptions[index] = output.num_preemptions
            stats.num_preemptions = sum(self.preemptions)
        if output.prefill_stats is not None:
            self.times[index].prefill = output.prefill_stats
            if self.num_cached_tokens is None:
                self.num_cached_tokens = output.prefill_stats.num_cached_tokens

    def make_output(self, completions: list[CompletionOutput]) -> RequestOutput:
        request = self.request
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is not None:
            if self.prompt_logprobs_sent and self.is_delta:
                prompt_logprobs = None
            self.prompt_logprobs_sent = True
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=completions,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=_copy(self.stats),
            embedding=self.embedding,
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

    def add_request(self, request: ProcessedRequest, sink: OutputSink | None = None) -> None:
        """Expect news of this request; its outputs go to ``sink``, or are returned."""
        state = _RequestState(request, self._tokenizer, self._clock(), sink, self._stream_interval)
        for index, core_request in enumerate(request.core_requests):
            self._states[core_request.request_id] = (state, index)
            self._core_ids.setdefault(request.request_id, []).append(core_request.request_id)

    def process_outputs(
        self, outputs: Iterable[EngineCoreOutput], iteration: IterationStats | None = None
    ) -> ProcessedOutputs:
        """Take the core's news in order; those of unknown (finished, aborted) ids are ignored.

        ``iteration``: filled in, and the figures of sequences that end are returned as well.
        """
        now = self._clock()
        if iteration is not None:
            iteration.timestamp = now
        done = ProcessedOutputs()
        for output in outputs:
            found = self._states.get(output.request_id)
            if found is not None:
                self._process(output, *found, now, done, iteration)
        return done

    def _process(
        self,
        output: EngineCoreOutput,
        state: _RequestState,
        index: int,
        now: float,
        done: ProcessedOutputs,
        iteration: IterationStats | None,
    ) -> None:
        sequence = state.sequences[index]
        before = len(sequence.token_ids)
        is_pooled = output.pooled is not None
        if output.pooled is not None and state.request.pooling is not None:
            state.embedding = finish_embedding(output.pooled, state.request.pooling)
            # The token only stood for the vector.
            output = msgspec.structs.replace(output, new_token_ids=[], pooled=None)
        sequence.update(output)
        new_tokens = len(sequence.token_ids) - before
        state.observe(index, output, now, new_tokens)
        times = state.times[index]
        if new_tokens or is_pooled:
            if iteration is not None:
                _count(iteration, state, times, now, new_tokens)
            times.first_token = times.first_token or now
            times.last_token = now
        if output.new_prompt_logprobs is not None and state.prompt_logprobs is None:
            state.prompt_logprobs = named_prompt_logprobs(
                output.new_prompt_logprobs, state.request.prompt_token_ids, self._tokenizer
            )
        if sequence.finish_reason is not None:
            self._forget(output.request_id, state)
            done.ended.append(output.request_id)
            if iteration is not None:
                done.finished.append(_finished_stats(state, index, now))
            if sequence.stopped_by_text and output.finish_reason is None:
                done.reqs_to_abort.append(output.request_id)
        self._tell(state, self._output_now(state, sequence, first=before == 0), done)

    @staticmethod
    def _tell(state: _RequestState, made: RequestOutput | None, done: ProcessedOutputs) -> None:
        if made is None:
            return
        if state.sink is not None:
            state.sink(made)
        else:
            done.request_outputs.append(made)

    def _output_now(
        self, state: _RequestState, sequence: SequenceState, *, first: bool
    ) -> RequestOutput | None:
        if state.is_final_only:
            if not state.finished:
                return None
            return state.make_output([each.take_output(delta=False) for each in state.sequences])
        num_unsent = sequence.num_unsent_tokens
        due = num_unsent >= state.stream_interval or (first and num_unsent > 0)
        if not due and sequence.finish_reason is None:
            return None
        return state.make_output([sequence.take_output(delta=state.is_delta)])

    def abort_requests(
        self, request_ids: Iterable[str], *, with_stats: bool = False
    ) -> ProcessedOutputs:
        """End requests by the user's ids (or core ids): last outputs, and what the core must stop.

        Unknown ids are ignored. ``with_stats``: return the figures of what ended as well.
        """
        now = self._clock()
        done = ProcessedOutputs()
        for request_id in request_ids:
            known = [request_id] if request_id in self._states else []
            for core_id in list(self._core_ids.get(request_id, known)):
                state, index = self._states[core_id]
                sequence = state.sequences[index]
                sequence.abort()
                self._forget(core_id, state)
                done.reqs_to_abort.append(core_id)
                done.ended.append(core_id)
                if with_stats:
                    done.finished.append(_finished_stats(state, index, now))
                self._tell(state, self._output_now(state, sequence, first=False), done)
        return done

    def _forget(self, core_id: str, state: _RequestState) -> None:
        del self._states[core_id]
        state.num_unfinished -= 1
        siblings = self._core_ids[state.request.request_id]
        siblings.remove(core_id)
        if not siblings:
            del self._core_ids[state.request.request_id]


def _copy(stats: RequestStateStats) -> RequestStateStats:
    """The figures now; written out, because it is done for every output."""
    return RequestStateStats(
        stats.arrival_time,
        stats.first_token_ts,
        stats.last_token_ts,
        stats.num_generation_tokens,
        stats.num_preemptions,
    )


def _count(
    iteration: IterationStats, state: _RequestState, times: SequenceTimes, now: float, tokens: int
) -> None:
    """A sequence got tokens, or a vector: add to the figures of this message."""
    iteration.num_generation_tokens += tokens
    if times.last_token:
        iteration.inter_token_latencies.append(now - times.last_token)
        return
    if tokens:
        iteration.time_to_first_tokens.append(now - state.stats.arrival_time)
    if times.prefill is not None:
        iteration.num_prompt_tokens += times.prefill.num_prompt_tokens
        iteration.num_cached_tokens += times.prefill.num_cached_tokens


def _finished_stats(state: _RequestState, index: int, now: float) -> FinishedRequestStats:
    request, sequence, times = state.request, state.sequences[index], state.times[index]
    assert sequence.finish_reason is not None
    assert request.params.max_tokens is not None
    prefill = times.prefill
    arrival, first = state.stats.arrival_time, times.first_token
    scheduled = 0.0 if prefill is None else prefill.scheduled_ts
    return FinishedRequestStats(
        request_id=request.request_id,
        index=index,
        finish_reason=FinishReason[sequence.finish_reason.upper()],
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0 if prefill is None else prefill.num_cached_tokens,
        num_generation_tokens=len(sequence.token_ids),
        max_tokens=request.params.max_tokens if request.pooling is None else 0,
        n=request.params.n,
        num_preemptions=state.preemptions[index],
        e2e_latency=now - arrival,
        queued_time=0.0 if prefill is None else prefill.scheduled_ts - prefill.queued_ts,
        prefill_time=first - scheduled if first and scheduled else 0.0,
        decode_time=times.last_token - first,
        time_to_first_token=first - arrival if first else 0.0,
        is_last=state.finished,
    )


def merge_request_outputs(
    older: RequestOutput, newer: RequestOutput, kind: RequestOutputKind
) -> RequestOutput:
    """One output for two that a slow reader has not fetched: nothing of a DELTA is lost."""
    if kind != RequestOutputKind.DELTA:
        untouched = [o for o in older.outputs if all(o.index != n.index for n in newer.outputs)]
        outputs = sorted([*untouched, *newer.outputs], key=lambda output: output.index)
        return msgspec.structs.replace(newer, outputs=outputs)
    merged = {output.index: output for output in older.outputs}
    for output in newer.outputs:
        before = merged.get(output.index)
        merged[output.index] = output if before is None else _join_deltas(before, output)
    return msgspec.structs.replace(
        newer,
        outputs=[merged[index] for index in sorted(merged)],
        prompt_logprobs=older.prompt_logprobs or newer.prompt_logprobs,
    )


def _join_deltas(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    return msgspec.structs.replace(
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
