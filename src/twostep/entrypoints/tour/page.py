"""The tour as a page of the documentation.

Nothing in it depends on the machine, and no line numbers: it changes when the engine does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from twostep.entrypoints.tour import facts
from twostep.entrypoints.tour.journey import Journey
from twostep.entrypoints.tour.layout import block, show, wrap
from twostep.entrypoints.tour.questions import all_questions
from twostep.entrypoints.tour.source import Place
from twostep.entrypoints.tour.stops import Stop, all_stops
from twostep.entrypoints.tour.text import TABLE_NOTE, TIME_NOTE, counter_rows, introduction

COMMAND = "twostep tour --markdown"
WIDTH = 96
HEAD = f"""\
# Tour: one engine step

<!-- Written by `{COMMAND}`; CI fails if it is stale. Change the engine, not this page. -->

In one sentence: one call of `step_with_batch_queue` plans and queues step k for two requests, then
finishes step k-1 and sends its token. This page was written by the engine itself; `twostep tour`
shows the same in a terminal, `twostep tour --json` as one document, and `twostep tour --live MODEL`
on a real model with measured times.
"""


def tour_page(journey: Journey) -> str:
    """The page, in Markdown."""
    stops = all_stops(journey)
    parts = [HEAD, _paragraph(introduction(journey)), _fenced(facts.config_document(journey))]
    parts += ["## The twelve stops", _table(_overview(stops))]
    for stop in stops:
        parts += _stop(stop)
    parts += [
        "## The counters across three calls",
        _paragraph(TABLE_NOTE),
        _table(counter_rows(journey)),
    ]
    parts += ["## Where the time goes", _paragraph(TIME_NOTE), "The device, in ms:"]
    parts += [_table(facts.device_lane(journey)), "## Check yourself"]
    for number, question in enumerate(all_questions(journey), start=1):
        parts += [
            f"**{number}. {question.question}**",
            "<details><summary>Answer</summary>",
            _paragraph(question.answer),
            _fenced(question.evidence),
            "</details>",
        ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _stop(stop: Stop) -> Iterator[str]:
    yield f"### Stop {stop.number}: {stop.name}"
    yield "In " + ", ".join(map(_link, (stop.place, *stop.also))) + "."
    yield _paragraph(stop.story)
    yield _fenced(stop.data)


def _overview(stops: Sequence[Stop]) -> list[dict[str, Any]]:
    return [
        {"stop": stop.number, "what_happens": stop.name, "function": _link(stop.place)}
        for stop in stops
    ]


def _paragraph(text: str) -> str:
    return "\n".join(wrap(text, WIDTH))


def _link(place: Place) -> str:
    return f"[`{place.short}`](../{place.file})"


def _fenced(data: dict[str, Any]) -> str:
    return "\n".join(["```text", *block(data, WIDTH), "```"])


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = [name.replace("_", " ") for name in rows[0]]
    lines = [head, ["---"] * len(head)]
    lines += [["-" if item is None else show(item) for item in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
