"""``twostep tour``: one engine step, executed and looked at stop by stop."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console
from twostep.entrypoints.cli.engine import tell_watch

if TYPE_CHECKING:
    from twostep.entrypoints.tour.live import LiveTour

DEVICE = "h100"
WIDEST = 100
"""Longer lines are hard to read."""

DESCRIPTION = """\
Execute one call of the engine's step function and look at it, stop by stop: the real engine
core and scheduler on a simulated H100, or, with --live, on a real model on this machine.

  twostep tour
  twostep tour --json | jq .counters
  twostep tour --device a100-80
  twostep tour --live smollm2-135m
"""


def run(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = cli_args.Parser("twostep tour", "", DESCRIPTION)
    add = parser.add_argument
    add("--live", metavar="MODEL", help="on a real model, with measured times")
    add("--device", metavar="NAME", help=f"the simulated device (default {DEVICE})")
    add("--prompt-tokens", type=cli_args.positive_size, metavar="N", help="tokens of A's prompt")
    add(
        "--max-num-batched-tokens",
        type=cli_args.positive_size,
        metavar="N",
        help="tokens of one step (default: the device's)",
    )
    add(
        "-t", "--threads", type=cli_args.positive_size, metavar="N", help="compute threads (--live)"
    )
    cli_args.add_watch_flags(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON document on standard output")
    output.add_argument("--markdown", action="store_true", help="as the page docs/tour.md")
    args = parser.parse(argv)
    cli_args.check_watch_flags(args)
    if args.live is None:
        if args.threads is not None:
            raise UsageError("--threads is for --live: a simulated device has none")
        if args.device == "cpu":
            raise UsageError("this machine's CPU need not be simulated: twostep tour --live MODEL")
        return show_simulated(args)
    for flag, value in (("--device", args.device), ("--markdown", args.markdown)):
        if value:
            raise UsageError(f"{flag} is for the simulated tour: leave it or --live out")
    return show_live(args)


def show_simulated(args: argparse.Namespace) -> int:
    """The tour on a simulated device."""
    # Late: `twostep tour --help` needs none of it.
    from twostep.entrypoints.tour.document import tour_document
    from twostep.entrypoints.tour.journey import Situation
    from twostep.entrypoints.tour.page import tour_page
    from twostep.entrypoints.tour.simulated import simulate
    from twostep.entrypoints.tour.text import tour_text
    from twostep.entrypoints.tracing.watch import Watch

    asked = args.prompt_tokens
    with contextlib.closing(Watch(args.trace, args.record)) as watch:
        journey = simulate(
            Situation() if asked is None else Situation(prompt_tokens_a=asked),
            device=args.device or DEVICE,
            max_num_batched_tokens=args.max_num_batched_tokens,
            watch=watch,
        )
    if args.json:
        console.print_json(tour_document(journey))
    elif args.markdown:
        print(tour_page(journey), end="")
    else:
        print(tour_text(journey, text_width(), *styles()))
    tell_watch(watch)
    return 0


def show_live(args: argparse.Namespace) -> int:
    """The tour on a real model."""
    from twostep.entrypoints.tour.live_document import live_document
    from twostep.entrypoints.tour.live_text import live_text

    tour = go_live(args)
    if args.json:
        console.print_json(live_document(tour))
    else:
        print(live_text(tour, text_width(), *styles()))
    return 0


def go_live(args: argparse.Namespace) -> LiveTour:
    """Load the model, take the tour, let the model go."""
    from twostep.entrypoints.cli.engine import phases
    from twostep.entrypoints.engine_options import EngineOptions
    from twostep.entrypoints.inproc_engine import build_engine
    from twostep.entrypoints.progress import reporter_for
    from twostep.entrypoints.resolve import resolve
    from twostep.entrypoints.tour.live import run_live

    model = resolve(args.live, reporter_for())
    options = EngineOptions(
        max_num_batched_tokens=args.max_num_batched_tokens,
        threads=args.threads,
        trace=args.trace,
        record=args.record,
    )
    with phases() as progress:
        engine = build_engine(model.path, options, progress)
    try:
        return run_live(engine, args.prompt_tokens)
    finally:
        engine.client.close()
        engine.watch.close()
        tell_watch(engine.watch)


def text_width() -> int:
    """Columns to write in."""
    return min(shutil.get_terminal_size().columns, WIDEST)


def styles() -> tuple[partial[str], partial[str]]:
    """Bold and grey, if standard output is a terminal."""
    return (
        partial(console.bold, stream=sys.stdout),
        partial(console.dim, stream=sys.stdout),
    )
