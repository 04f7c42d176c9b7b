"""What the sampler must know about one request, as its row on the device holds it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from twostep.contracts.plan import NewRequestData
from twostep.contracts.sampling import SamplingParams

_SEED_MASK = (1 << 64) - 1


class RowParams(msgspec.Struct, frozen=True, kw_only=True):
    """The keywords of the native ``SampleState.stage``; ``docs/sampling.md`` has their meaning."""

    prompt_len: int
    """The first tokens of the history are the prompt; those behind are outputs."""
    seed: int = 0
    """0 to 2**64 - 1."""
    temperature: float = 0.0
    """0 (or below 1e-5) is greedy."""
    top_k: int = 0
    """0, below 0, or the vocabulary's size and above: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: list[int] = msgspec.field(default_factory=list)
    bias_values: list[float] = msgspec.field(default_factory=list)
    """One for each of ``bias_ids``; clamped to ±100."""
    allowed_ids: list[int] = msgspec.field(default_factory=list)
    """Empty: every token."""
    bad_words: list[list[int]] = msgspec.field(default_factory=list)
    stop_ids: list[int] = msgspec.field(default_factory=list)
    """Masked while the request has fewer than ``min_tokens`` outputs."""
    min_tokens: int = 0
    num_logprobs: int = -1
    """How many besides the sampled token's own; -1 is off."""
    num_prompt_logprobs: int = -1
    logprob_ids: list[int] = msgspec.field(default_factory=list)
    """Of sampled tokens: these instead of the best ``num_logprobs``."""


def row_params(request: NewRequestData, vocab_size: int) -> RowParams:
    """The row of a request that was just admitted or resumed.

    Raises:
        ValueError: the request has no seed; one is drawn at admission.
    """
    params: SamplingParams = request.sampling_params
    if params.seed is None:
        raise ValueError(f"request {request.request_id}: no seed; admission must draw one")
    bias = params.logit_bias or {}
    return RowParams(
        prompt_len=request.prompt_len,
        seed=params.seed & _SEED_MASK,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_ids=list(bias),
        bias_values=list(bias.values()),
        allowed_ids=params.allowed_token_ids or [],
        bad_words=params.bad_words_token_ids or [],
        stop_ids=request.stop_token_ids if params.min_tokens > 0 else [],
        min_tokens=params.min_tokens,
        num_logprobs=_count(params.logprobs, vocab_size),
        num_prompt_logprobs=_count(params.prompt_logprobs, vocab_size),
        logprob_ids=params.logprob_token_ids or [],
    )


def stage_row(state: Any, step: Any, row: int, token_ids: list[int], params: RowParams) -> None:
    """Replace a row of the native ``SampleState`` in stream order, before ``step`` runs.

    ``token_ids`` are all tokens known so far. Raises ValueError if a token id lies outside the
    vocabulary or a number outside its range.
    """
    values = {name: getattr(params, name) for name in _FIELDS}
    if params.logprob_ids:
        values["logprob_ids"] = params.logprob_ids
    state.stage(step, row, np.asarray(token_ids, dtype=np.int32), **values)


def _count(logprobs: int | None, vocab_size: int) -> int:
    if logprobs is None:
        return -1
    return vocab_size if logprobs < 0 else logprobs


_FIELDS = tuple(name for name in RowParams.__struct_fields__ if name != "logprob_ids")
"""``logprob_ids`` is rarely there: most rows are staged without it."""
