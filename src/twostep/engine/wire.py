"""Every message between the API process and the engine core process: msgpack, never pickle.

A frame for each message, both ways over one socket pair. When either process dies, the other one
reads the end of file, after everything that was sent before.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from twostep.contracts.engine_info import EngineInfo
from twostep.contracts.live_view import LiveUpdate
from twostep.contracts.outputs import EngineCoreOutputs
from twostep.contracts.request import EngineCoreRequest

T = TypeVar("T")

UtilityMethod = Literal["reset_prefix_cache", "pause", "resume"]


class WireError(ValueError):
    """A frame that is no message; says what is wrong with it."""


# -- to the core -----------------------------------------------------------------------------------


class _ClientMessage(msgspec.Struct, frozen=True, array_like=True):
    """What the API process sends."""


class AddRequest(_ClientMessage, frozen=True, tag="add"):
    """Queue a request. Answered by outputs, or by ``Refused``."""

    request: EngineCoreRequest


class AbortRequests(_ClientMessage, frozen=True, tag="abort"):
    """End requests without further news; unknown ids are ignored."""

    request_ids: list[str]


class UtilityCall(_ClientMessage, frozen=True, tag="call"):
    """Call a method of the core. Answered by ``UtilityResult``."""

    call_id: int
    method: UtilityMethod
    argument: str | None = None
    """The mode of ``pause``."""


class Watch(_ClientMessage, frozen=True, tag="watch"):
    """Send live updates from now on (``wanted``), or no more. Asked again: the whole picture."""

    wanted: bool


class Shutdown(_ClientMessage, frozen=True, tag="shutdown"):
    """Drop all requests and end the process."""


ClientMessage = AddRequest | AbortRequests | UtilityCall | Watch | Shutdown


# -- from the core ---------------------------------------------------------------------------------


class _CoreMessage(msgspec.Struct, frozen=True, array_like=True):
    """What the engine core sends."""


class LoadProgress(_CoreMessage, frozen=True, tag="progress"):
    """How far the start is."""

    phase: str
    fraction: float


class Ready(_CoreMessage, frozen=True, tag="ready"):
    """The model is loaded; requests are served from now on."""

    info: EngineInfo


class Outputs(_CoreMessage, frozen=True, tag="outputs"):
    """News of one step."""

    outputs: EngineCoreOutputs


class Refused(_CoreMessage, frozen=True, tag="refused"):
    """A request that is not served: the fields of its ``InvalidRequestError``."""

    request_id: str
    message: str
    param: str | None
    code: str


class UtilityResult(_CoreMessage, frozen=True, tag="result"):
    """What a method returned, or why it failed."""

    call_id: int
    value: bool | None
    error: str | None = None


class Live(_CoreMessage, frozen=True, tag="live"):
    """What the engine did, for those who watch."""

    update: LiveUpdate


class LastWords(_CoreMessage, frozen=True, tag="last words"):
    """Why the core process ends. None are left by one that is killed."""

    kind: str
    """Name of the error's class in ``contracts.errors``."""
    message: str


CoreMessage = LoadProgress | Ready | Outputs | Refused | UtilityResult | Live | LastWords


# -- frames ----------------------------------------------------------------------------------------


class Codec:
    """Frames to messages and back. One for each thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._client_messages = msgspec.msgpack.Decoder(ClientMessage)
        self._core_messages = msgspec.msgpack.Decoder(CoreMessage)

    def encode(self, message: ClientMessage | CoreMessage) -> bytes:
        """The frame of a message."""
        return self._encoder.encode(message)

    def decode_client_message(self, frame: bytes) -> ClientMessage:
        """Raises WireError for anything that is not one."""
        return _decode(self._client_messages, frame)

    def decode_core_message(self, frame: bytes) -> CoreMessage:
        """Raises WireError for anything that is not one."""
        return _decode(self._core_messages, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"a frame of {len(frame)} bytes is no message: {error}") from None
