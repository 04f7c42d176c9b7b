"""Token counts and times of an answer."""

from __future__ import annotations

from twostep.contracts.results import RequestOutput
from twostep.server.protocol.common import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Timings,
    Usage,
)


class UsageCounter:
    """Counts what the outputs of one HTTP request bring; the same for streams and whole answers."""

    def __init__(self, num_prompts: int) -> None:
        self._latest: list[RequestOutput | None] = [None] * num_prompts
        self.num_completion_tokens = 0
        self.num_reasoning_tokens: int | None = None
        """None: this endpoint knows no reasoning."""

    def add(self, index: int, output: RequestOutput) -> None:
        """Count an output of prompt ``index``: its tokens must be new ones."""
        self._latest[index] = output
        for completion in output.outputs:
            self.num_completion_tokens += len(completion.token_ids)

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self._latest if output is not None)

    @property
    def _num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens or 0 for output in self._latest if output is not None)

    def usage(self) -> Usage:
        """The counts so far."""
        prompt, completion = self._num_prompt_tokens, self.num_completion_tokens
        reasoning = self.num_reasoning_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
            completion_tokens_details=None
            if reasoning is None
            else CompletionTokensDetails(reasoning_tokens=reasoning),
        )

    def timings(self) -> Timings:
        """The times so far."""
        cached = self._num_cached_tokens
        computed = self._num_prompt_tokens - cached
        stats = [output.metrics for output in self._latest if output and output.metrics]
        arrival = min((each.arrival_time for each in stats), default=0.0)
        first = min((each.first_token_ts for each in stats if each.first_token_ts), default=0.0)
        last = max((each.last_token_ts for each in stats), default=0.0)
        prompt_ms = 1000 * max(0.0, first - arrival)
        predicted_ms = 1000 * max(0.0, last - first)
        predicted = self.num_completion_tokens
        return Timings(
            cache_n=cached,
            prompt_n=computed,
            prompt_ms=round(prompt_ms, 3),
            prompt_per_token_ms=round(prompt_ms / max(computed, 1), 3),
            prompt_per_second=_rate(computed, prompt_ms),
            predicted_n=predicted,
            predicted_ms=round(predicted_ms, 3),
            predicted_per_token_ms=round(predicted_ms / max(predicted - 1, 1), 3),
            predicted_per_second=_rate(predicted - 1, predicted_ms),
        )


def _rate(count: int, milliseconds: float) -> float:
    return round(1000 * count / milliseconds, 3) if count > 0 and milliseconds > 0 else 0.0


def shown_reasons(
    finish_reason: str | None, stop_reason: int | str | None
) -> tuple[str | None, int | str | None]:
    """(finish_reason, stop_reason) in OpenAI's words: a repetition is a stop."""
    if finish_reason == "repetition":
        return "stop", "repetition"
    return finish_reason, stop_reason
