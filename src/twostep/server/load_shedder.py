"""Refusals at the door: what a crowd that finds no room costs those who are served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from twostep.server.errors import ApiError
from twostep.server.middleware.boundary import log_access, request_id_of
from twostep.server.middleware.http_metrics import declared_bytes
from twostep.server.state import ServerState

Headers = list[tuple[bytes, bytes]]


class Answer(msgspec.Struct, frozen=True):
    """An error as bytes: what is the same each time."""

    status: int
    head: bytes
    """Status line, and headers with the end of their lines."""
    body: bytes

    @classmethod
    def of(cls, error: ApiError) -> Answer:
        """``error`` as JSON."""
        body = error.body()
        fields = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **{name.lower(): value for name, value in error.headers.items()},
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return cls(error.status, STATUS_LINE[error.status] + lines.encode("latin-1"), body)


class LoadShedder:
    """Answers requests that a full queue would turn away, as soon as their headers are here.

    Beside threads that compute, a refusal that goes through all layers costs the server's process
    three times as much. Whoever might get another answer than this one goes through them.
    """

    def __init__(
        self,
        state: ServerState,
        paths: Iterable[str],
        checks: Sequence[Callable[[Headers], bool]],
    ) -> None:
        """``paths``: of the requests that wait in the queue. ``checks``: say of headers whether
        the layers would let the request through."""
        self._state = state
        self._paths = {path.encode(): path for path in paths}
        self._checks = checks
        self._log_access = not state.settings.disable_access_log
        self._answers: dict[str, Answer] = {}
        """By the limit that leaves no room."""

    def limit(self) -> str | None:
        """The name of the limit that leaves no room now."""
        return self._state.in_flight.exceeded() if self._state.status == "ready" else None

    def answer(self, limit: str, url: bytes, headers: Headers, defaults: Headers) -> bytes | None:
        """The response to a POST request, or None: it goes its way. ``defaults`` are headers that
        every response has."""
        path = self._paths.get(url)
        if path is None or not all(check(headers) for check in self._checks):
            return None
        if any(name == b"origin" for name, _ in headers):
            return None  # a page: what it may see is for the layers to say
        answer, request_id = self._refuse(limit), request_id_of(headers)
        self._state.observability.http.observe(
            "POST",
            answer.status,
            path,
            seconds=0.0,
            request_bytes=declared_bytes(headers),
            response_bytes=len(answer.body),
        )
        if self._log_access:
            shown = self._state.settings.root_path + path
            log_access("POST", shown, answer.status, 0.0, 0.0, request_id)
        lines = [name + b": " + value for name, value in defaults]
        lines += [b"x-request-id: " + request_id.encode(), b"", answer.body]
        return answer.head + b"\r\n".join(lines)

    def _refuse(self, limit: str) -> Answer:
        in_flight = self._state.in_flight
        if limit in self._answers:
            in_flight.on_rejected(limit)
        else:
            self._answers[limit] = Answer.of(in_flight.refuse(limit))
        return self._answers[limit]
