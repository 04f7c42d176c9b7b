"""Every sampling parameter, checked before a request enters the engine core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.sampling import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    ThinkingBudget,
)

_MAX_INT64 = 2**63 - 1
_MIN_TEMPERATURE = 0.01
"""Smaller ones, but for 0, are raised to this: dividing by less overflows."""
_BOOLEANS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def check_sampling_params(
    params: SamplingParams, limits: Limits, vocab_size: int
) -> SamplingParams:
    """A copy of ``params`` in normal form; InvalidRequestError naming the first bad field.

    Normal form: ``stop``, ``stop_token_ids`` and ``bad_words`` are lists or None, greedy requests
    have no top-k, top-p or min-p, ``top_k`` is 0 or below the vocabulary size, tiny temperatures
    are 0.01, ``logprobs`` is 0 beside ``logprob_token_ids``. What depends on prompt or tokenizer is
    left to ``InputProcessor``.
    """
    params = params.clone()
    for name in _BOOLEANS:
        if not isinstance(getattr(params, name), bool):
            raise _bad(name, getattr(params, name), "true or false")
    _check_numbers(params)
    _check_counts(params, limits)
    params.stop = _check_stop(params.stop, limits)
    _check_token_lists(params, limits, vocab_size)
    _check_structured(params.structured_outputs, limits, vocab_size)
    _check_repetition(params.repetition_detection, limits)
    if params.stop and not params.detokenize:
        raise InvalidRequestError("stop strings need detokenize=True", "stop")
    _normalize(params, vocab_size)
    return params


def _check_numbers(params: SamplingParams) -> None:
    _check_float("temperature", params.temperature, 0.0, 2.0)
    _check_float("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _check_float("min_p", params.min_p, 0.0, 1.0)
    _check_float("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_float("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _check_float("repetition_penalty", params.repetition_penalty, 0.0, math.inf, open_low=True)
    _check_int("top_k", params.top_k, -1, _MAX_INT64)
    if params.seed is not None:
        _check_int("seed", params.seed, -_MAX_INT64 - 1, _MAX_INT64)
    _check_int("priority", params.priority, -_MAX_INT64 - 1, _MAX_INT64)


def check_n(n: Any, limits: Limits) -> None:
    """For those who make something for each sequence before all parameters are checked."""
    _check_int("n", n, 1, limits.max_n)


def _check_counts(params: SamplingParams, limits: Limits) -> None:
    check_n(params.n, limits)
    if params.n > 1 and params.temperature == 0:
        raise InvalidRequestError(
            "n > 1 with temperature 0 would give the same text n times; raise the temperature", "n"
        )
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 1, _MAX_INT64)
    _check_int("min_tokens", params.min_tokens, 0, _MAX_INT64)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({params.min_tokens}) is larger than max_tokens ({params.max_tokens})",
            "min_tokens",
        )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            low, high = (-1, _MAX_INT64) if limits.max_logprobs == -1 else (0, limits.max_logprobs)
            _check_int(name, value, low, high)
    if params.stream_interval is not None:
        _check_int("stream_interval", params.stream_interval, 1, _MAX_INT64)
    if not isinstance(params.output_kind, RequestOutputKind):
        raise _bad("output_kind", params.output_kind, "a RequestOutputKind")


def _check_stop(stop: Any, limits: Limits) -> list[str] | None:
    stops = _list_of("stop", [stop] if isinstance(stop, str) else stop, limits, "max_stop_strings")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise _bad("stop", text, "a text that is not empty")
        if (size := _utf8_size("stop", text)) > limits.max_stop_string_bytes:
            raise InvalidRequestError(
                f"a stop string has {size} bytes; at most {limits.max_stop_string_bytes} "
                "(max_stop_string_bytes) are allowed",
                "stop",
            )
    return stops or None


def _check_token_lists(params: SamplingParams, limits: Limits, vocab_size: int) -> None:
    ids = _list_of("stop_token_ids", params.stop_token_ids, limits, "max_stop_token_ids")
    _check_ids("stop_token_ids", ids, vocab_size)
    params.stop_token_ids = list(dict.fromkeys(ids)) or None
    words = _list_of("bad_words", params.bad_words, limits, "max_bad_words")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise _bad("bad_words", word, "a text that is not blank")
        _utf8_size("bad_words", word)
    params.bad_words = words or None
    if params.allowed_token_ids is not None:
        allowed = _list_of(
            "allowed_token_ids", params.allowed_token_ids, limits, "max_allowed_token_ids"
        )
        _check_ids("allowed_token_ids", allowed, vocab_size)
        if not allowed:
            raise InvalidRequestError(
                "allowed_token_ids is empty, so no token could be chosen; leave it out",
                "allowed_token_ids",
            )
        params.allowed_token_ids = list(dict.fromkeys(allowed))
    scored = _list_of(
        "logprob_token_ids", params.logprob_token_ids, limits, "max_logprob_token_ids"
    )
    _check_ids("logprob_token_ids", scored, vocab_size)
    params.logprob_token_ids = list(dict.fromkeys(scored)) or None
    _check_bad_words_ids(params.bad_words_token_ids, limits, vocab_size)
    _check_logit_bias(params.logit_bias, limits, vocab_size)


def _check_bad_words_ids(words: Any, limits: Limits, vocab_size: int) -> None:
    words = _list_of("bad_words_token_ids", words, limits, "max_bad_words_tokens")
    for ids in words:
        ids = _list_of("bad_words_token_ids", ids, limits, "max_bad_words_tokens")
        if not ids:
            raise _bad("bad_words_token_ids", ids, "lists of at least one token id")
        _check_ids("bad_words_token_ids", ids, vocab_size)


def _check_logit_bias(bias: Any, limits: Limits, vocab_size: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise _bad("logit_bias", bias, "{token id: number}")
    _check_length("logit_bias", len(bias), limits, "max_logit_bias")
    _check_ids("logit_bias", list(bias), vocab_size)
    for token_id, value in bias.items():
        if not _is_number(value) or not -100 <= value <= 100:
            raise InvalidRequestError(
                f"logit_bias of token {token_id} is {_short(value)}; "
                "it must be a number from -100 to 100",
                "logit_bias",
            )


def _check_structured(structured: Any, limits: Limits, vocab_size: int) -> None:
    if structured is None:
        return
    if not isinstance(structured, StructuredOutputsParams):
        raise _bad("structured_outputs", structured, "a StructuredOutputsParams")
    fields = ("json", "regex", "choice", "grammar", "json_object")
    if structured.thinking is not None:
        _check_thinking(structured.thinking, limits, vocab_size)
    num_kinds = sum(getattr(structured, name) not in (None, False) for name in fields)
    if num_kinds > 1 or (num_kinds == 0 and structured.thinking is None):
        raise InvalidRequestError(
            f"structured_outputs must set exactly one of {', '.join(fields)}", "structured_outputs"
        )


def _check_thinking(budget: Any, limits: Limits, vocab_size: int) -> None:
    name = "thinking_token_budget"
    if not isinstance(budget, ThinkingBudget):
        raise _bad(name, budget, "a ThinkingBudget")
    _check_int(name, budget.max_tokens, 0, _MAX_INT64)
    for tag in (budget.start, budget.end):
        if not isinstance(tag, str) or not tag:
            raise _bad(name, tag, "a budget whose tags are texts that are not empty")
        if _utf8_size(name, tag) > limits.max_stop_string_bytes:
            raise _bad(name, tag, f"a budget whose tags have {limits.max_stop_string_bytes} bytes")
    if not budget.end_token_ids:
        raise _bad(name, budget.end_token_ids, "a budget with the ids that end reasoning")
    _check_ids(name, list(budget.end_token_ids), vocab_size)


def _check_repetition(detection: Any, limits: Limits) -> None:
    """Every token is compared with what came before it, so the pattern's length is bounded."""
    if detection is None:
        return
    name = "repetition_detection"
    if not isinstance(detection, RepetitionDetectionParams):
        raise _bad(name, detection, "a RepetitionDetectionParams")
    longest = limits.max_repetition_pattern_size
    sizes = (detection.min_pattern_size, detection.max_pattern_size, detection.min_count)
    if not (
        all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
        and 1 <= detection.min_pattern_size <= detection.max_pattern_size <= longest
        and detection.min_count >= 2
    ):
        wanted = f"patterns of 1 to {longest} tokens, the shortest first, and a min_count from 2"
        raise _bad(name, detection, wanted)


def _normalize(params: SamplingParams, vocab_size: int) -> None:
    for name in _FLOATS:
        setattr(params, name, float(getattr(params, name)))
    if params.temperature == 0:
        params.top_p, params.top_k, params.min_p = 1.0, 0, 0.0
    elif params.temperature < _MIN_TEMPERATURE:
        params.temperature = _MIN_TEMPERATURE
    if params.top_k < 0 or params.top_k >= vocab_size:
        params.top_k = 0
    if params.logprob_token_ids is not None:
        params.logprobs = 0


def _check_float(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    good = _is_number(value) and low <= value <= high and not (open_low and value == low)
    if not good:
        bound = f"above {low:g}" if open_low else f"from {low:g}"
        bound += f" to {high:g}" if math.isfinite(high) else ""
        raise _bad(name, value, f"a finite number {bound}")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        bound = f"from {low} to {high}" if high < _MAX_INT64 else f"of at least {low}"
        if low < -1:
            bound = "of 64 bits"
        raise _bad(name, value, f"an integer {bound}")


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INT64


def _list_of(name: str, value: Any, limits: Limits, limit: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise _bad(name, value, "a list")
    _check_length(name, len(value), limits, limit)
    return list(value)


def _check_length(name: str, length: int, limits: Limits, limit: str) -> None:
    if length > getattr(limits, limit):
        raise InvalidRequestError(
            f"{name} has {length} entries; at most {getattr(limits, limit)} ({limit}) are allowed",
            name,
        )


def _check_ids(name: str, ids: list[Any], vocab_size: int) -> None:
    for token_id in ids:
        if (
            not isinstance(token_id, int)
            or isinstance(token_id, bool)
            or not 0 <= token_id < vocab_size
        ):
            raise InvalidRequestError(
                f"{name} has {_short(token_id)}, which is no token id; "
                f"ids of this model are 0 to {vocab_size - 1}",
                name,
            )


def _utf8_size(name: str, text: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{name} has a text that is not valid Unicode (a lone surrogate); remove it", name
        ) from None


def _short(value: Any) -> str:
    """A value as an error shows it: never long, never NaN in JSON."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= 40 else text[:37] + "..."


def _bad(name: str, value: Any, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {_short(value)}; it must be {wanted}", name)
