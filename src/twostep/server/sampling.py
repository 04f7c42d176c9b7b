"""From a request's fields to SamplingParams. Ranges are checked by ``frontend.sampling_checks``."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.sampling import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from twostep.frontend.sampling_checks import check_n
from twostep.server.errors import ApiError, shown
from twostep.server.protocol.common import ResponseFormat, SamplingFields, StructuredOutputs

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "stream_interval",
    "priority",
)
"""Fields that mean the same in a request and in SamplingParams."""

_TOKEN_ID = re.compile(r"-?\d{1,20}", re.ASCII)


def sampling_params(
    request: SamplingFields, defaults: SamplingParams, limits: Limits
) -> SamplingParams:
    """``defaults`` with what the request sets; ``max_tokens`` and ``logprobs`` are the endpoint's.

    Raises ApiError for what SamplingParams cannot hold, InvalidRequestError for an ``n`` out of
    bounds: writers make something for each choice before the engine checks the rest.
    """
    _check_unsupported(request)
    params = defaults
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            setattr(params, name, value)
    check_n(params.n, limits)
    if (
        request.stream
        and params.prompt_logprobs is not None
        and request.prompt_logprobs is not None
    ):
        raise ApiError(
            "invalid_value",
            "prompt_logprobs cannot be streamed; leave stream or prompt_logprobs out",
            "prompt_logprobs",
        )
    if request.logit_bias:
        params.logit_bias = _logit_bias(request.logit_bias)
    if (detection := request.repetition_detection) is not None:
        params.repetition_detection = RepetitionDetectionParams(
            max_pattern_size=detection.max_pattern_size,
            **{
                name: value
                for name in ("min_pattern_size", "min_count")
                if (value := getattr(detection, name)) is not None
            },
        )
    params.structured_outputs = _structured(request)
    return params


def _check_unsupported(request: SamplingFields) -> None:
    budget = request.thinking_token_budget
    if budget is not None and budget < -1:
        raise ApiError(
            "invalid_value",
            f"thinking_token_budget is {shown(budget)}; it must be -1 (no bound) or at least 0",
            "thinking_token_budget",
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            "invalid_value",
            "stream_options needs stream: true; set it or leave it out",
            "stream_options",
        )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not _TOKEN_ID.fullmatch(key):
            raise ApiError(
                "invalid_value",
                f"logit_bias has the key {shown(key)!r}; keys are token ids",
                "logit_bias",
            )
        bias[int(key)] = value
    return bias


def _structured(request: SamplingFields) -> StructuredOutputsParams | None:
    """The constraint that ``response_format`` or ``structured_outputs`` asks for."""
    from_format = None
    if request.response_format is not None:
        from_format = _from_response_format(request.response_format)
    if request.structured_outputs is None:
        return from_format
    if from_format is not None:
        raise ApiError(
            "invalid_value",
            "response_format and structured_outputs exclude each other; send one",
            "structured_outputs",
        )
    return _from_structured_outputs(request.structured_outputs)


def _from_response_format(given: ResponseFormat) -> StructuredOutputsParams | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if given.type == "structural_tag":
        raise ApiError(
            "unsupported_feature", "structural tags are not supported", "response_format.type"
        )
    if given.type != "json_schema":
        raise ApiError(
            "invalid_value",
            f"response_format.type is {shown(given.type)!r}; it must be text, json_object or "
            "json_schema",
            "response_format.type",
        )
    if given.json_schema is None or given.json_schema.schema is None:
        path = "response_format.json_schema"
        path += "" if given.json_schema is None else ".schema"
        raise ApiError("missing_required_parameter", f"{path} is required and was not given", path)
    # As OpenAI has it: without ``strict``, keywords that cannot be kept are left out.
    return _json(given.json_schema.schema, strict=bool(given.json_schema.strict))


def _from_structured_outputs(given: StructuredOutputs) -> StructuredOutputsParams | None:
    if given.structural_tag is not None:
        raise ApiError(
            "unsupported_feature",
            "structural tags are not supported",
            "structured_outputs.structural_tag",
        )
    json_object = given.json_object or None
    values = (given.json, given.regex, given.choice, given.grammar, json_object)
    if sum(value is not None for value in values) != 1:
        raise ApiError(
            "invalid_value",
            "structured_outputs must set exactly one of json, regex, choice, grammar and "
            "json_object",
            "structured_outputs",
        )
    if given.json is not None:
        return _json(
            given.json,
            strict=True,
            disable_any_whitespace=bool(given.disable_any_whitespace),
            whitespace_pattern=given.whitespace_pattern,
        )
    return StructuredOutputsParams(
        regex=given.regex,
        choice=None if given.choice is None else tuple(given.choice),
        grammar=given.grammar,
        json_object=json_object,
    )


def _json(
    schema: dict[str, Any] | str | bool,
    *,
    strict: bool,
    disable_any_whitespace: bool = False,
    whitespace_pattern: str | None = None,
) -> StructuredOutputsParams:
    if isinstance(schema, bool):  # true allows every JSON value, false none
        schema = "true" if schema else "false"
    if isinstance(schema, str):
        try:
            msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
            raise ApiError(
                "invalid_schema", f"the schema is not JSON: {error}", "structured_outputs.json"
            ) from None
    return StructuredOutputsParams(
        json=schema,
        strict=strict,
        disable_any_whitespace=disable_any_whitespace,
        whitespace_pattern=whitespace_pattern,
    )


def renamed(error: InvalidRequestError, names: dict[str, str]) -> InvalidRequestError:
    """The same error with the field's name as this endpoint's clients know it."""
    if error.param in names:
        return InvalidRequestError(str(error), names[error.param], error.code)
    return error
