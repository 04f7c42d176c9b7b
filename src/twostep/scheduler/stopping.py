"""When a request is done. Stop strings are text: the front end looks for them."""

from __future__ import annotations

from twostep.scheduler.request import Request, RequestStatus


def append_and_check_stop(request: Request, token_id: int) -> RequestStatus | None:
    """Append a sampled token; returns how it ends the request, None if it does not.

    Sets ``stop_reason``. An end token wins over the length limit that the same token reaches.
    """
    request.all_token_ids.append(token_id)
    request.num_tokens += 1
    if token_id == request.eos_token_id:
        return RequestStatus.FINISHED_STOPPED
    if token_id in request.stop_token_ids:
        request.stop_reason = token_id
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None
