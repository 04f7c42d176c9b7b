"""Stop strings."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from twostep.frontend.stop_strings import StopStringMatcher

STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text(alphabet="abc", max_size=4), max_size=8)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """What a reader sees before the stop, and the stop string."""
    matcher = StopStringMatcher(stops)
    text = shown = ""
    for piece in pieces:
        match = matcher.feed(piece)
        if match is not None:
            end = len(text) + match.end - len(match.stop)
            assert end >= len(shown), "part of the stop string was shown"
            return (text + piece)[:end], match.stop
        text += piece
        shown = text[: len(text) - matcher.held]
    return text, None


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """The match that ends first; of those ending together, the first of the list."""
    best: tuple[int, int] | None = None
    for order, stop in enumerate(stops):
        at = text.find(stop)
        if at >= 0 and (best is None or (at + len(stop), order) < best):
            best = (at + len(stop), order)
    if best is None:
        return text, None
    end, order = best
    return text[: end - len(stops[order])], stops[order]


@settings(max_examples=400, deadline=None)
@given(STOPS, PIECES)
@example(["ab", "b c"], ["ab c"])
@example(["aab"], ["aa", "ab"])
def test_matches_are_those_of_the_definition(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == by_definition(stops, "".join(pieces))


@settings(max_examples=400, deadline=None)
@given(STOPS, st.text(alphabet="abc", max_size=12))
def test_holds_back_exactly_what_may_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(stops)
    if matcher.feed(text) is not None:
        return
    longest = max(
        size
        for stop in stops
        for size in range(len(stop))
        if text.endswith(stop[:size]) or size == 0
    )
    assert matcher.held == longest


def test_b14_stop_string_over_several_tokens_is_never_shown() -> None:
    assert run(["DEFGHIJ"], ["ABC", "D", "EF", "GH", "IJ", "K"]) == ("ABC", "DEFGHIJ")


def test_case_57_two_stop_strings_in_one_piece() -> None:
    assert run(["ab", "b c"], ["ab c"]) == ("", "ab")


def test_what_was_held_is_released_when_it_leads_nowhere() -> None:
    matcher = StopStringMatcher(["STOP"])
    held = []
    for piece in ("Hello", " ST", "A", "S", "x"):
        assert matcher.feed(piece) is None
        held.append(matcher.held)
    assert held == [0, 2, 0, 1, 0]


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_ties_go_to_the_first_of_the_list(stops: list[str]) -> None:
    match = StopStringMatcher(stops).feed("ab")
    assert match is not None
    assert match.stop == stops[0]


def test_b21_emoji_as_stop_string() -> None:
    assert run(["👩‍👩‍👧"], ["a👩", "\u200d", "👩\u200d", "👧b"]) == ("a", "👩‍👩‍👧")
