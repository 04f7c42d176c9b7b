"""The two requests: brings an engine core to the moment the tour begins, and on from there."""

from __future__ import annotations

import msgspec

from twostep.contracts.errors import TwostepError, UsageError
from twostep.contracts.executor import Executor
from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.contracts.sampling import SamplingParams
from twostep.engine.client import InprocClient
from twostep.engine.core import EngineCore
from twostep.entrypoints.tour.observer import Call, Counters, Launch, TourObserver

A, B = "A", "B"
"""The long prompt, and the answer in progress."""
NUM_CALLS = 3
"""Calls of the counter table."""
OUTPUTS_AFTER = 10_000
"""B and A go on as long as anybody looks."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Who is there when call k begins."""

    prompt_tokens_b: int = 500
    known_outputs_b: int = 40
    """B's next token is on the device."""
    prompt_tokens_a: int = 20_000
    """A's first chunk is on the device with it."""


class Journey(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, from call k on."""

    client: InprocClient
    calls: list[Call]
    """k, k+1, k+2, and on until both requests decode."""
    begin: Call
    """Call k-1: its step is in flight when call k begins."""

    @property
    def core(self) -> EngineCore:
        """The engine core that all of it happened in."""
        return self.client.engine_core

    @property
    def executor(self) -> Executor:
        """Whatever runs the plans."""
        return self.core.executor

    @property
    def k(self) -> int:
        """The id of the step that call k plans."""
        return self.plan(0).step_id

    def plan(self, index: int) -> SchedulerOutput:
        """What call k + index planned."""
        return self.calls[index].plan

    def name(self, step_id: int) -> str:
        """A step as people call it: k-1, k, k+1."""
        offset = step_id - self.k
        return f"k{offset:+d}" if offset else "k"

    def after_schedule(self, index: int) -> dict[str, Counters]:
        """The counters when call k + index had planned."""
        return self.calls[index].scheduled.requests

    @property
    def two_decodes(self) -> Launch:
        """The first launch in which both requests decode."""
        return next(call for call in self.calls if _both_decode(call)).launch


def travel(
    client: InprocClient, observer: TourObserver, situation: Situation, vocab_size: int
) -> Journey:
    """Really run B until one more token makes the known ones, let A arrive, and go on from there.

    Raises TwostepError if a step fails, UsageError if A's prompt is no chunk any more in step k.
    """
    core = client.engine_core
    prompt_b, prompt_a = (
        [(start + i) % vocab_size for i in range(count)]
        for start, count in ((100, situation.prompt_tokens_b), (1000, situation.prompt_tokens_a))
    )
    client.add_request(make_request(B, prompt_b))
    record = core.scheduler.requests[B]
    while record.num_output_tokens < situation.known_outputs_b - 1:
        _step(client, observer)
    client.add_request(make_request(A, prompt_a))
    _step(client, observer)
    begin = observer.calls[-1]
    observer.calls.clear()
    while len(observer.calls) < NUM_CALLS or not any(map(_both_decode, observer.calls)):
        _step(client, observer)
    journey = Journey(client=client, begin=begin, calls=list(observer.calls))
    if not journey.after_schedule(0)[A].is_prefill_chunk:
        budget = core.scheduler.config.max_num_batched_tokens
        raise UsageError(
            f"a prompt of {situation.prompt_tokens_a} tokens is done before step k ends: the tour "
            f"needs one that is longer than two steps of {budget} tokens"
        )
    return journey


def _step(client: InprocClient, observer: TourObserver) -> None:
    client.get_output()
    if observer.failure is not None:
        raise TwostepError(f"the tour ends early: {observer.failure}")


def make_request(
    request_id: str, prompt: list[int], max_tokens: int = OUTPUTS_AFTER
) -> EngineCoreRequest:
    """A request that ends at its length only."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0),
        eos_token_id=None,
        arrival_time=0.0,
    )


def _both_decode(call: Call) -> bool:
    return call.plan.num_scheduled_tokens == {B: 1, A: 1}
