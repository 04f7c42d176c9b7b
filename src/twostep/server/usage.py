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
        self._num_prompt_tokens = [0] * num_prompts
        self._num_cached_tokens = [0] * num_prompts
        self._arrival = 0.0
        self._first_token = 0.0
        self._last_token = 0.0
        self.num_completion_tokens = 0
        self.num_reasoning_tokens: int | None = None
        """None: this endpoint knows no reasoning."""

    def add(self, index: int, output: RequestOutput) -> None:
        """Count an output of prompt ``index``: its tokens must be new ones."""
        self._num_prompt_tokens[index] = len(output.prompt_token_ids)
        if output.num_cached_tokens:
            self._num_cached_tokens[index] = output.num_cached_tokens
        for completion in output.outputs:
            self.num_completion_tokens += len(completion.token_ids)
        if (stats := output.metrics) is not None:
            self._arrival = min(self._arrival or stats.arrival_time, stats.arrival_time)
            if stats.first_token_ts:
                first = self._first_token or stats.first_token_ts
                self._first_token = min(first, stats.first_token_ts)
            self._last_token = max(self._last_token, stats.last_token_ts)

    def usage(self) -> Usage:
        """The counts so far."""
        prompt, completion = sum(self._num_prompt_tokens), self.num_completion_tokens
        reasoning = self.num_reasoning_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached_tokens)),
            completion_tokens_details=None
            if reasoning is None
            else CompletionTokensDetails(reasoning_tokens=reasoning),
        )

    def timings(self) -> Timings:
        """The times so far."""
        cached = sum(self._num_cached_tokens)
        computed = sum(self._num_prompt_tokens) - cached
        prompt_ms = 1000 * max(0.0, self._first_token - self._arrival)
        predicted_ms = 1000 * max(0.0, self._last_token - self._first_token)
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
