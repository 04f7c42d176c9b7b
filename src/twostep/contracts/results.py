"""What users of the Python API get."""

from __future__ import annotations

import msgspec


class Logprob(msgspec.Struct):
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct):
    """One generated sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One {token id: Logprob} for each generated token."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


class RequestStateStats(msgspec.Struct):
    """When things happened to a request, in seconds of the front end's monotonic clock."""

    arrival_time: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0


class RequestOutput(msgspec.Struct):
    """The answer, or a part of it, to one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """The first entry is None: nothing predicts the first token."""
    num_cached_tokens: int | None = None
    metrics: RequestStateStats | None = None
    embedding: list[float] | None = None
    """Of an embedding request: its vector. Such a request has no tokens."""


class EmbeddingOutput(msgspec.Struct):
    """One vector."""

    embedding: list[float]
    """float32 values; empty if the request failed."""

    @property
    def hidden_size(self) -> int:
        """Numbers of the vector."""
        return len(self.embedding)


class EmbeddingRequestOutput(msgspec.Struct):
    """The answer to one embedding request."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int | None = None
    finished: bool = True
    error: str | None = None
    """Why there is no vector: the request failed in the engine, or was aborted."""

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """The final output of an embedding request."""
        [end] = output.outputs
        error = None
        if output.embedding is None:
            error = str(end.stop_reason or end.finish_reason)
        return cls(
            request_id=output.request_id,
            outputs=EmbeddingOutput(output.embedding or []),
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
            error=error,
        )
