"""Frames over a socket pair: whole, in order, whatever the pieces they travel in."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.frames import HEADER_BYTES, FrameError, FrameSocket

Pair = tuple[FrameSocket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Ours, and the bare other end."""
    ours, theirs = socket.socketpair()
    with theirs:
        wire = FrameSocket(ours)
        yield wire, theirs
        wire.close()


def receive_all(wire: FrameSocket) -> list[bytes]:
    """Everything until the other end is closed."""
    found: list[bytes] = []
    while (frames := wire.receive()) is not None:
        found += frames
    return found


def encoded(frame: bytes) -> bytes:
    return len(frame).to_bytes(HEADER_BYTES, "little") + frame


@given(frames=st.lists(st.binary(max_size=40), max_size=8), cuts=st.lists(st.integers(1, 30)))
def test_whatever_the_pieces(frames: list[bytes], cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    wire = FrameSocket(ours)
    stream = b"".join(map(encoded, frames))
    found: list[bytes] = []
    for cut in [*cuts, len(stream)]:
        if stream[:cut]:
            theirs.send(stream[:cut])
        stream = stream[cut:]
        found += wire.receive() or []
    theirs.close()
    found += receive_all(wire)
    wire.close()
    assert found == frames


def test_nothing_has_come(pair: Pair) -> None:
    assert pair[0].receive() == []


def test_the_end_comes_behind_what_was_sent(pair: Pair) -> None:
    wire, theirs = pair
    theirs.send(encoded(b"last words") + b"\x05\x00")
    theirs.close()
    assert wire.receive() == [b"last words"]
    assert wire.receive() is None


def test_an_end_with_something_unread_is_an_end(pair: Pair) -> None:
    """The system calls it a reset connection."""
    wire, theirs = pair
    wire.send(b"unread")
    theirs.send(encoded(b"news"))
    theirs.close()
    assert receive_all(wire) == [b"news"]


def test_what_finds_no_room_is_kept_and_sent_later_in_order() -> None:
    ours, theirs = map(FrameSocket, socket.socketpair())
    sent = [bytes([i]) * (7000 * i) for i in range(60)]
    for frame in sent:
        ours.send(frame)
    assert ours.num_unsent_bytes
    assert not ours.flush()
    found: list[bytes] = []
    while not ours.flush():
        found += theirs.receive() or []
    assert ours.num_unsent_bytes == 0
    ours.send(b"behind all of it")
    ours.close()
    found += receive_all(theirs)
    theirs.close()
    assert found == [*sent, b"behind all of it"]


def test_an_end_that_is_gone_is_an_error(pair: Pair) -> None:
    wire, theirs = pair
    theirs.close()
    with pytest.raises(ConnectionError):
        wire.send(b"x")


def test_a_stream_that_is_no_frames(pair: Pair) -> None:
    wire, theirs = pair
    theirs.send(b"HTTP/1.1 200 OK")
    with pytest.raises(FrameError, match="announced"):
        wire.receive()
