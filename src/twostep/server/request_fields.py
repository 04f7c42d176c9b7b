"""Fields that all endpoints of a model treat the same: ids, priority, salt, the log line."""

from __future__ import annotations

import logging
import re

import msgspec

from twostep.contracts.sampling import SamplingParams
from twostep.server.errors import ApiError, shown
from twostep.server.http import HttpCall
from twostep.server.protocol.common import SamplingFields
from twostep.server.protocol.embeddings import EmbeddingRequest
from twostep.server.state import ServerState

logger = logging.getLogger("twostep.server.requests")

AnyRequest = SamplingFields | EmbeddingRequest

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def answer_id(prefix: str, call: HttpCall, request: AnyRequest) -> str:
    """The id of the answer: ``prefix-`` and the request's id."""
    given = request.request_id
    if given is None:
        return f"{prefix}-{call.request_id}"
    if not REQUEST_ID.fullmatch(given):
        raise ApiError(
            "invalid_value",
            f"request_id is {shown(given, 40)!r}; it must be 1 to 128 letters, digits, . _ : and -",
            "request_id",
        )
    return f"{prefix}-{given}"


def request_priority(call: HttpCall, request: AnyRequest) -> int:
    """The body's priority, else the X-Vllm-Priority header's, else 0."""
    if request.priority is not None:
        return request.priority
    header = call.header(b"x-vllm-priority")
    if header is None:
        return 0
    try:
        return int(header)
    except ValueError:
        raise ApiError(
            "invalid_value",
            f"X-Vllm-Priority is {shown(header, 40)!r}; it must be an integer",
            "priority",
        ) from None


def cache_salt(request: AnyRequest) -> str | None:
    """What isolates the request's prefix cache; ApiError for a salt that names no tenant."""
    salt = request.cache_salt
    if salt is not None and any(char in salt for char in "@/\\"):
        raise ApiError("invalid_value", "cache_salt must not have @, / or \\ in it", "cache_salt")
    return salt


def log_request(
    state: ServerState, name: str, request: SamplingFields, params: SamplingParams
) -> None:
    """With --enable-log-requests: the request's parameters. Prompts are never logged."""
    if state.settings.enable_log_requests:
        shown_params = msgspec.structs.asdict(params)
        for hidden in ("stop", "bad_words", "bad_words_token_ids", "structured_outputs"):
            if shown_params.get(hidden) is not None:
                shown_params[hidden] = "..."
        logger.info("request %s: stream=%s %s", name, bool(request.stream), shown_params)
