"""When a request is done. Stop strings are text: the front end looks for them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from twostep.contracts.sampling import RepetitionDetectionParams
from twostep.scheduler.request import Request, RequestStatus

REPETITION_DETECTED = "repetition_detected"
"""The ``stop_reason`` of a request that repeats itself."""


def check_stop(request: Request, token_id: int) -> RequestStatus | None:
    """How the request's newest token ends it, None if it does not. Sets ``stop_reason``.

    An end token, or the end of the request's grammar, wins over the length limit that the same
    token reaches.
    """
    if token_id in request.end_token_ids:
        if token_id != request.eos_token_id:
            request.stop_reason = token_id
        return RequestStatus.FINISHED_STOPPED
    if request.grammar is not None and request.grammar.is_terminated():
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    params = request.sampling_params
    if params.repetition_detection is None or request.num_output_tokens < params.min_tokens:
        return None
    if repeats(request.all_token_ids, request.num_output_tokens, params.repetition_detection):
        request.stop_reason = REPETITION_DETECTED
        return RequestStatus.FINISHED_REPETITION
    return None


def repeats(
    token_ids: Sequence[int] | array[int], num_output_tokens: int, params: RepetitionDetectionParams
) -> bool:
    """Whether the outputs (the last ``num_output_tokens`` ids) end in ``min_count`` equal patterns.

    Shorter patterns are tried first.
    """
    count = params.min_count
    if count < 2:
        return False
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        if size * count > num_output_tokens:
            return False
        pattern = token_ids[-size:]
        tail = token_ids[-size * count : -size]
        if all(tail[start : start + size] == pattern for start in range(0, len(tail), size)):
            return True
    return False
