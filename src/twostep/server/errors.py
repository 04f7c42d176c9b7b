"""Every error a client can get, in OpenAI's shape.

``{"error": {"message", "type", "param", "code"}}``: ``type`` and ``code`` are stable words, the
status is in the status line, ``param`` is the path of the field. Nothing of the machine is told
(no paths, no tracebacks, no addresses), and at most 200 characters of a value come back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from twostep.contracts.errors import EngineDeadError, InvalidRequestError, TwostepError

MAX_MESSAGE_CHARS = 1500

BAD_REQUEST = "invalid_request_error"

_STATUS_OF_CODE = {
    "invalid_api_key": 401,
    "invalid_host": 403,
    "model_not_found": 404,
    "not_found": 404,
    "unknown_url": 404,
    "method_not_allowed": 405,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "header_too_large": 431,
    "internal_error": 500,
    "engine_dead": 500,
    "server_overloaded": 503,
    "loading": 503,
    "engine_restarting": 503,
    "shutting_down": 503,
    "request_timeout": 504,
}
"""Codes that are not listed are 400."""

_TYPE_OF_STATUS = {401: "authentication_error", 500: "server_error", 504: "timeout_error"}
_TYPE_OF_STATUS[503] = "service_unavailable_error"

CODES = frozenset(
    {
        *_STATUS_OF_CODE,
        "invalid_json",
        "missing_required_parameter",
        "invalid_type",
        "invalid_value",
        "context_length_exceeded",
        "invalid_schema",
        "unsupported_feature",
    }
)


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        assert code in CODES, code
        super().__init__(message)
        self.code = code
        self.message = one_line(message)
        self.param = param
        self.headers = dict(headers or {})
        self.status = _STATUS_OF_CODE.get(code, 400)
        self.type = _TYPE_OF_STATUS.get(self.status, BAD_REQUEST)

    def detail(self) -> ErrorDetail:
        """The object under ``error``."""
        return ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code)

    def body(self) -> bytes:
        """The JSON document."""
        return msgspec.json.encode(ErrorResponse(self.detail()))


def overloaded(message: str, code: str = "server_overloaded", retry_after: int = 1) -> ApiError:
    """503: come again in ``retry_after`` seconds."""
    return ApiError(code, message, headers={"Retry-After": str(retry_after)})


_SCHEMA_PARAMS = ("structured_outputs", "response_format")


def from_exception(error: Exception) -> ApiError:
    """The answer for whatever was raised; what is not known is an internal error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        code = error.code
        if code == "invalid_value" and error.param in _SCHEMA_PARAMS:
            code = "invalid_schema"
        return ApiError(code if code in CODES else "invalid_value", scrub(str(error)), error.param)
    if isinstance(error, EngineDeadError):
        return engine_dead()
    if isinstance(error, RecursionError):
        return ApiError("invalid_value", "the request nests too deeply; make it flatter")
    return internal()


def internal() -> ApiError:
    """An error that is ours; the log says more, under the request's id."""
    return ApiError("internal_error", "the server failed on this request; its log says why")


def engine_dead() -> ApiError:
    """The engine died while it had the request."""
    return ApiError("engine_dead", "the engine stopped while it had this request; send it again")


def is_ours(error: Exception) -> bool:
    """Whether somebody should look into it: neither the client's fault nor a known state."""
    return not isinstance(error, ApiError | TwostepError | RecursionError)


_PATHS = re.compile(r"(?<![\w/.])/(?:[\w.+@-]+/)+[\w.+@-]*")
_ADDRESSES = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


def scrub(text: str) -> str:
    """A message of a library without file paths and memory addresses."""
    return _ADDRESSES.sub("0x…", _PATHS.sub("<path>", text))


def one_line(text: str) -> str:
    """Valid Unicode of a bounded length, without line breaks."""
    text = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


def shown(value: object, most: int = 200) -> str:
    """A value as a message shows it: at most ``most`` characters."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= most else text[: most - 1] + "…"
