"""How fast a loaded model decodes and prefills here: what a roofline is held against."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from twostep.contracts.results import RequestOutput
from twostep.contracts.sampling import RequestOutputKind, SamplingParams

Clock = Callable[[], float]
HIGHEST_TOKEN_ID = 10_000


class SteppedEngine(Protocol):
    """What is asked of ``LLM``."""

    def add_request(self, prompt: Any, sampling_params: SamplingParams) -> str:
        """Queue a request."""
        ...

    def step(self) -> list[RequestOutput]:
        """One engine step."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` still has something to do."""
        ...


def prefill_seconds(
    engine: SteppedEngine, num_tokens: int, vocab_size: int, rounds: int, clock: Clock
) -> list[float]:
    """Seconds from a prompt to its first token, for each round after one that warms up.

    Every round has a prompt of its own, so that the prefix cache knows none.
    """
    found = []
    for number in range(rounds + 1):
        started = clock()
        _drain(engine, [_prompt(num_tokens, vocab_size, f"prefill {number}")], 1, clock)
        found.append(clock() - started)
    return found[1:]


def decode_seconds(
    engine: SteppedEngine,
    batch: int,
    context: int,
    steps: int,
    vocab_size: int,
    rounds: int,
    clock: Clock,
) -> list[float]:
    """Seconds of one decode step of ``batch`` sequences, for each round.

    The prompts are computed first; the prefix cache then has them. The clock counts while all
    sequences decode.
    """
    prompts = [_prompt(context, vocab_size, f"decode {number}") for number in range(batch)]
    _drain(engine, prompts, 1, clock)
    found = []
    for _ in range(rounds):
        times = _drain(engine, prompts, steps + 1, clock)
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        tokens = sum(begin < moment <= end for each in times for moment in each)
        found.append(batch * (end - begin) / tokens)
    return found


def _prompt(length: int, vocab_size: int, seed: str) -> dict[str, list[int]]:
    ids = range(min(HIGHEST_TOKEN_ID, vocab_size))
    return {"prompt_token_ids": random.Random(seed).choices(ids, k=length)}


def _drain(
    engine: SteppedEngine, prompts: list[dict[str, list[int]]], max_tokens: int, clock: Clock
) -> list[list[float]]:
    """Run requests to their ends; the times of the tokens of each."""
    params = SamplingParams(
        temperature=0.8,
        top_p=0.95,
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=1,
        output_kind=RequestOutputKind.DELTA,
    )
    times: dict[str, list[float]] = {engine.add_request(each, params): [] for each in prompts}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = clock()
        for output in outputs:
            times[output.request_id] += [now] * len(output.outputs[0].token_ids)
    return list(times.values())
