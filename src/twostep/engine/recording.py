"""A recording: everything that moved an engine core, in order, as bytes.

A line that names the format, then frames: length of the payload, the same number inverted, CRC-32
of the payload (all uint32, little endian), then the payload, msgpack. So damage is told from an end
in the middle. The first frame is the :class:`Header`, all others are lists of events. A recording
that was closed ends with :class:`Closed`; without it the program was killed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.errors import TwostepError
from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import SchedulerOutput
from twostep.engine.recorded_grammars import GrammarNews

MAGIC = b"twostep recording\n"
FORMAT = 1
_FRAME = struct.Struct("<III")
_INVERT = 0xFFFFFFFF


class RecordingError(TwostepError):
    """A file that is no recording, or a damaged one."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine core was built with."""

    version: str
    """Of the package."""
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    num_spec_tokens: int
    max_concurrent_batches: int


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One call of a ``StepObserver``. ``time`` is in seconds of the core's clock."""

    time: float


class Called(Event, frozen=True, tag="called"):
    """A call from outside, and its arguments as a msgpack array."""

    method: str
    args: msgspec.Raw


class Started(Event, frozen=True, tag="started"):
    """The step function was called."""


class Planned(Event, frozen=True, tag="planned"):
    """The plan, as ``encode_plan`` writes it."""

    plan: msgspec.Raw


class Launched(Event, frozen=True, tag="launched"):
    """The forward pass of the last plan is queued."""


class SamplingLaunched(Event, frozen=True, tag="sampling launched"):
    """Its sampling is queued."""

    structured: list[str] | None
    """Requests whose tokens a grammar masks. The mask itself moves no core, and is large."""


class GrammarSaid(Event, frozen=True, tag="grammar said"):
    """A grammar moved the core; see ``engine.recorded_grammars``."""

    number: int
    """Grammars are counted in the order in which their compiling began, from 0."""
    news: GrammarNews
    detail: int | str | None = None
    """Why it failed, how many drafts were kept, or how many tokens were accepted before."""


class Waiting(Event, frozen=True, tag="waiting"):
    """The wait for the oldest step begins."""

    step_id: int


class Arrived(Event, frozen=True, tag="arrived"):
    """Its result is here."""

    step_id: int
    output: ModelRunnerOutput


class Failed(Event, frozen=True, tag="failed"):
    """It failed instead."""

    step_id: int
    reason: str
    is_fault: bool


class Updated(Event, frozen=True, tag="updated"):
    """The scheduler took the result, or the failure."""

    step_id: int


class Finished(Event, frozen=True, tag="finished"):
    """The step function returns."""

    executed: bool


class Closed(Event, frozen=True, tag="closed"):
    """The end."""


AnyEvent = (
    Called
    | Started
    | Planned
    | Launched
    | SamplingLaunched
    | GrammarSaid
    | Waiting
    | Arrived
    | Failed
    | Updated
    | Finished
    | Closed
)

_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_events_decoder = msgspec.msgpack.Decoder(list[AnyEvent])
_plan_decoder = msgspec.msgpack.Decoder(SchedulerOutput)


def encode_plan(plan: SchedulerOutput) -> bytes:
    """The plan as bytes: equal plans, equal bytes.

    Sets are sorted. Dictionaries are not: the order of ``num_scheduled_tokens`` is the plan order.
    """
    # Struct fields are not checked when they are set, and a list is encoded as a set is.
    ordered: Any = {
        name: sorted(value)
        for name in plan.__struct_fields__
        if isinstance(value := getattr(plan, name), frozenset) and len(value) > 1
    }
    return _encoder.encode(msgspec.structs.replace(plan, **ordered) if ordered else plan)


def decode_plan(data: bytes | msgspec.Raw) -> SchedulerOutput:
    """The plan that ``encode_plan`` wrote."""
    return _plan_decoder.decode(data)


def encode_args(args: tuple[object, ...]) -> msgspec.Raw:
    """Arguments of a call, for :class:`Called`."""
    return msgspec.Raw(_encoder.encode(args))


def encode_header(header: Header) -> bytes:
    """The beginning of a recording."""
    return MAGIC + _frame(_encoder.encode((FORMAT, header)))


def encode_events(events: list[AnyEvent]) -> bytes:
    """A frame of events."""
    return _frame(_encoder.encode(events))


def _frame(payload: bytes) -> bytes:
    length = len(payload)
    return _FRAME.pack(length, length ^ _INVERT, zlib.crc32(payload)) + payload


class Recording:
    """Reads a recording, frame by frame."""

    header: Header
    is_complete: bool
    """Whether it was closed; known when all events were read."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Read the header. ``name`` is for messages.

        Raises:
            RecordingError: Not a recording, of another format, or damaged.
        """
        self._file = file
        self._name = name
        self._position = 0
        self.is_complete = False
        if self._read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{name} is not a recording: make one with --record FILE")
        payload = self._next_payload()
        if payload is None:
            raise RecordingError(
                f"{name} ends in its header: the program was killed before its engine started"
            )
        self.header = self._decode_header(payload)

    def events(self) -> Iterator[AnyEvent]:
        """All events in order. What a killed program left unfinished at the end is not told.

        Raises:
            RecordingError: A frame is damaged.
        """
        while (payload := self._next_payload()) is not None:
            try:
                events = _events_decoder.decode(payload)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise self._damaged(str(error)) from None
            for event in events:
                if isinstance(event, Closed):
                    self.is_complete = True
                    return
                yield event

    def _decode_header(self, payload: bytes) -> Header:
        try:
            number, raw = msgspec.msgpack.decode(payload, type=tuple[int, msgspec.Raw])
            if number != FORMAT:
                raise RecordingError(
                    f"{self._name} has format {number}, this twostep reads format {FORMAT}: "
                    "replay it with the version that recorded it"
                )
            return _header_decoder.decode(raw)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise self._damaged(str(error)) from None

    def _next_payload(self) -> bytes | None:
        """The next frame's payload; None at the end, be it in the middle of a frame."""
        head = self._read(_FRAME.size)
        if len(head) < _FRAME.size:
            return None
        length, inverted, checksum = _FRAME.unpack(head)
        if length != inverted ^ _INVERT:
            raise self._damaged("no frame begins here")
        payload = self._read(length)
        if len(payload) < length:
            return None
        if zlib.crc32(payload) != checksum:
            raise self._damaged("wrong checksum")
        return payload

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        self._position += len(data)
        return data

    def _damaged(self, what: str) -> RecordingError:
        return RecordingError(
            f"{self._name} is damaged before byte {self._position:,} ({what}): record it again"
        )
