"""The tour for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from twostep.entrypoints.tour import facts
from twostep.entrypoints.tour.journey import A, B, Journey
from twostep.entrypoints.tour.layout import block, records, wrap
from twostep.entrypoints.tour.questions import all_questions
from twostep.entrypoints.tour.stops import Stop, all_stops

Style = Callable[[str], str]
"""Marks a line up for a terminal."""

INDENT = "    "
TABLE_NOTE = (
    "S: a step is planned, U: its result is taken. known: tokens that the host has; computed: "
    "with those planned; awaits: placeholders of tokens on the way; planned: tokens of B, A."
)
TIME_NOTE = (
    "Virtual time begins with call k. In it the host's work takes no time, so the clock stands "
    "still but for stop 10, where the host waits for step k-1. Terms of a step add up; weights or "
    "compute, whichever takes longer, is what bounds its matrix products."
)


def tour_text(journey: Journey, width: int, bold: Style, dim: Style) -> str:
    """All of the tour, in lines of at most ``width`` characters."""
    lines = [bold("One engine step, executed"), ""]
    lines += wrap(introduction(journey), width)
    lines += ["", *block(facts.config_document(journey), width, "  ")]
    lines += what_happened(journey, width, bold, dim)
    lines += ["", bold("Where the time goes"), *wrap(TIME_NOTE, width, INDENT)]
    lines += ["", f"{INDENT}The device, in ms"]
    lines += records(facts.device_lane(journey), width, INDENT)
    lines += ["", f"{INDENT}The host in call k, measured on this machine, in us"]
    lines += records(facts.host_lane(journey.calls[0]), width, INDENT)
    lines += ["", bold("Check yourself")]
    for number, question in enumerate(all_questions(journey), start=1):
        lines += ["", *hang(f"{number:>2}  ", question.question, width)]
        lines += wrap(question.answer, width, INDENT)
        lines += map(dim, block(question.evidence, width, INDENT + "  "))
    return "\n".join(lines)


def what_happened(journey: Journey, width: int, bold: Style, dim: Style) -> Iterator[str]:
    """The stops and the counter table."""
    for stop in all_stops(journey):
        yield ""
        yield from stop_lines(stop, width, bold, dim)
    yield from ["", bold("The counters across three calls"), *wrap(TABLE_NOTE, width, INDENT)]
    yield from records(counter_rows(journey), width, "  ")


def introduction(journey: Journey) -> str:
    """What is about to happen."""
    config = facts.config_document(journey)
    return (
        f"{config['model']} on one {config['device']}: the real engine core and scheduler on a "
        f"cost model of the device, in virtual time. {situation(journey)} (Simulated tokens are "
        "numbers: the n-th output token of a request has id n.)"
    )


def situation(journey: Journey) -> str:
    """The two requests, and what call k is."""
    now = journey.calls[0].started.requests
    a, b = now[A], now[B]
    known = b.num_tokens - b.num_prompt_tokens
    return (
        f"Request B is an answer in progress, with {b.num_prompt_tokens:,} prompt tokens and "
        f"{known} known output tokens; token {known + 1} is being computed in step k-1. Request A "
        f"has a prompt of {a.num_prompt_tokens:,} tokens; its first chunk, positions 0 to "
        f"{a.num_computed_tokens - 1:,}, is in the same step. Now the step function is called: it "
        "plans and queues step k and finishes step k-1. All that follows is read from the engine "
        "as it does so."
    )


def stop_lines(stop: Stop, width: int, bold: Style, dim: Style) -> Iterator[str]:
    """A stop: its name, who acts, what happened, the data."""
    yield bold(f"{stop.number:>2}  {stop.name}")
    yield dim(INDENT + stop.place.with_line)
    for other in stop.also:
        yield dim(INDENT + other.with_line)
    yield from wrap(stop.story, width, INDENT)
    yield from block(stop.data, width, INDENT + "  ")


def counter_rows(journey: Journey) -> list[dict[str, Any]]:
    """The counter table for people."""
    rows = []
    for event, view, plan in facts.events(journey):
        b, a = view.requests[B], view.requests[A]
        given = None if plan is None else facts.scheduled_tokens(plan).values()
        rows.append(
            {
                "event": event,
                "B known": b.num_tokens,
                "computed": b.num_computed_tokens,
                "B awaits": b.num_output_placeholders,
                "A computed": a.num_computed_tokens,
                "chunk": "yes" if a.is_prefill_chunk else "no",
                "A awaits": a.num_output_placeholders,
                "planned": given and ", ".join(map(str, given)),
            }
        )
    return rows


def hang(mark: str, text: str, width: int) -> list[str]:
    """A paragraph whose first line begins with a mark."""
    first, *others = wrap(text, width, " " * len(mark))
    return [mark + first.lstrip(), *others]
