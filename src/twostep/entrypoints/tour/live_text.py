"""The tour on a real model, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from twostep.entrypoints.tour.layout import block, records, wrap
from twostep.entrypoints.tour.live import LaneSpan, LiveTour, lanes_of_call, overlap_of_call
from twostep.entrypoints.tour.text import INDENT, Style, situation, what_happened

NARROWEST_BAR = 10


def live_text(tour: LiveTour, width: int, bold: Style, dim: Style) -> str:
    """All of the tour, in lines of at most ``width`` characters."""
    journey = tour.journey
    lines = [bold("One engine step, executed on this machine"), ""]
    lines += wrap(f"{tour.config['model']} on this machine's CPU. {situation(journey)}", width)
    lines += ["", *block(tour.config, width, "  "), *what_happened(journey, width, bold, dim)]
    overlap = overlap_of_call(journey.calls[0])
    lines += ["", bold("Where the time goes: call k, in ms since it began")]
    lines += wrap(
        f"While the host planned step k, prepared its inputs and queued it, the device computed "
        f"step k-1 for {overlap:.0%} of that time.",
        width,
        INDENT,
    )
    lines += lane_lines(lanes_of_call(journey), width)
    lines += ["", bold("Steady decoding: does the device wait for the host?")]
    lines += wrap(
        "Means of many steps, each with one token of every stream. Plan, launch (with inputs and "
        "sampling), wait and update are the host's. Overlap: share of planning and launch during "
        "which the device computed. Idle: share of time in which the device had nothing to do.",
        width,
        INDENT,
    )
    rows = [
        {
            "streams": row["streams"],
            "step_ms": row["ms_per_step"],
            "plan_us": row["planning_us"],
            "launch_us": row["launch_us"],
            "wait_ms": row["wait_ms"],
            "update_us": row["update_us"],
            "overlap": f"{row['overlap']:.1%}",
            "idle": f"{row['device_idle']:.2%}",
        }
        for row in tour.steady
    ]
    lines += records(rows, width, "  ") if rows else []
    return "\n".join(lines)


def lane_lines(spans: Sequence[LaneSpan], width: int) -> list[str]:
    """One line for each span, with a bar that shows when it was."""
    name_width = max(len(span.what) for span in spans)
    heads = [f"{INDENT}{span.lane:<6}  {span.what:<{name_width}}" for span in spans]
    times = [f"{span.start:9.2f} {span.end:9.2f}" for span in spans]
    room = max(NARROWEST_BAR, width - len(heads[0]) - len(times[0]) - 4)
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    scale = room / (last - first)
    lines = []
    for span, head, time in zip(spans, heads, times, strict=True):
        left = min(int((span.start - first) * scale), room - 1)
        length = max(1, round((span.end - first) * scale) - left)
        lines.append(f"{head}  {time}  {' ' * left}{'#' * min(length, room - left)}")
    return lines
