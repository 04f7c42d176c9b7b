"""Requests that nobody sent: lengths and arrival times drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from twostep.contracts.request import EngineCoreRequest
from twostep.contracts.sampling import SamplingParams


class LengthRange(msgspec.Struct, frozen=True):
    """Tokens, drawn evenly from both ends and all between."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What users do. Exactly one of ``request_rate`` and ``concurrency`` is set."""

    num_requests: int
    input_len: LengthRange
    output_len: LengthRange
    request_rate: float | None = None
    """Requests a second on average; intervals are exponential (a Poisson process)."""
    concurrency: int | None = None
    """So many users, each of whom sends the next request when the last one is answered."""
    shared_prefix_len: int = 0
    """Tokens that all prompts begin with; they count as input."""
    seed: int = 0

    def requests(self, vocab_size: int) -> Iterator[EngineCoreRequest]:
        """The requests in order of arrival; ``arrival_time`` is 0 for a closed loop.

        Each draws from a source of its own, so another rate leaves its lengths as they are.
        """
        times = random.Random(f"{self.seed} arrivals")
        prefix = _token_ids(
            random.Random(f"{self.seed} prefix"), self.shared_prefix_len, vocab_size
        )
        moment = 0.0
        for number in range(self.num_requests):
            rng = random.Random(f"{self.seed} {number}")
            if self.request_rate is not None:
                moment += times.expovariate(self.request_rate)
            length = rng.randint(self.input_len.low, self.input_len.high)
            max_tokens = rng.randint(self.output_len.low, self.output_len.high)
            own = _token_ids(rng, length - len(prefix), vocab_size)
            yield EngineCoreRequest(
                request_id=f"r{number}",
                prompt_token_ids=[*prefix[:length], *own],
                sampling_params=SamplingParams(max_tokens=max_tokens, seed=number),
                eos_token_id=None,
                arrival_time=moment,
            )


def _token_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return rng.choices(range(vocab_size), k=max(0, count))
