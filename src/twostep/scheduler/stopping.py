"""When a request is done. Stop strings are text: the front end looks for them."""

from __future__ import annotations

from twostep.scheduler.request import Request, RequestStatus


def check_stop(request: Request, token_id: int) -> RequestStatus | None:
    """How the token just appended ends the request, None if it does not; sets ``stop_reason``.

    An end token wins over the length limit that the same token reaches.
    """
    if token_id == request.eos_token_id:
        return RequestStatus.FINISHED_STOPPED
    if token_id in request.stop_token_ids:
        request.stop_reason = token_id
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None
