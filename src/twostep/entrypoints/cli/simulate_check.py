"""``twostep simulate check``: random users drive the engine core, and every rule is checked."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console

if TYPE_CHECKING:
    from twostep.sim.campaign import Failure, Tally
    from twostep.sim.case import Case

DESCRIPTION = """\
Drive the real engine core with made-up users, aborts, preemptions and failures, on a ghost device
and in virtual time, and recompute after every step whether all rules hold. Each seed is a run of
its own. A seed that breaks a rule is shrunk to a few events, printed as a test and saved as a file
for --replay.
"""
MODES = {"sync": (False,), "async": (True,), "both": (False, True)}


def run(argv: list[str]) -> int:
    """Run the command; returns the exit code: 1 if a rule was broken, 130 if stopped by hand."""
    args = make_parser().parse(argv)
    if args.replay is not None:
        return replay(args)
    from twostep.entrypoints.machine import inspect_machine
    from twostep.entrypoints.progress import Silent, reporter_for
    from twostep.sim.campaign import run_campaign

    for flag in ("report", "save"):
        check_folder(flag, getattr(args, flag))
    reporter = Silent() if args.json and not sys.stderr.isatty() else reporter_for()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with reporter.count("simulating", len(seeds), "seeds") as advance:
        tally = run_campaign(
            seeds,
            steps=args.steps,
            modes=MODES[args.mode],
            jobs=args.jobs or inspect_machine().usable_cpus,
            max_failures=args.max_failures,
            on_progress=advance,
        )
    if args.report is not None:
        write_report(args, tally)
    shrunk = [shrink_failure(failure) for failure in tally.failures[:1]]
    if args.json:
        console.print_json(document(tally, shrunk))
    else:
        print(console.table(rows(tally)))
        for failure in shrunk:
            print(describe(failure.case))
    for failure in shrunk:
        save(failure.case, args.save)
    if tally.was_interrupted:
        print(f"stopped by hand after {tally.seeds:,} runs", file=sys.stderr)
        return 1 if tally.failures else 130
    return 1 if tally.failures else 0


def make_parser() -> cli_args.Parser:
    """All flags."""
    parser = cli_args.Parser("twostep simulate check", "", DESCRIPTION)
    add = parser.add_argument
    size = cli_args.positive_size
    add("--seeds", type=size, default=200, metavar="N", help="runs (default: 200)")
    add("--steps", type=size, default=500, metavar="N", help="engine steps of a run (default: 500)")
    add("--first-seed", type=cli_args.size, default=0, metavar="N", help="default: 0")
    add(
        "--mode", choices=list(MODES), default="both",
        help="synchronous scheduling, asynchronous, or both (default)",
    )  # fmt: skip
    add("--jobs", type=size, metavar="N", help="processes (default: one for each core)")
    add("--max-failures", type=size, default=1, metavar="N", help="go on until N (default: 1)")
    add("--json", action="store_true", help="one JSON document on standard output")
    add("--report", metavar="FILE", help="write the totals as Markdown")
    add(
        "--save", metavar="FILE", default="twostep-failing-case.json",
        help="where a failing case goes (default: twostep-failing-case.json)",
    )  # fmt: skip
    add("--replay", metavar="FILE", help="run a saved case again instead")
    return parser


def replay(args: argparse.Namespace) -> int:
    """Run one saved case."""
    from twostep.sim.case import read_case
    from twostep.sim.simulation import run_case

    outcome = run_case(read_case(Path(args.replay)))
    found = outcome.violation
    if args.json:
        console.print_json(
            {
                "steps": outcome.steps,
                "digest": outcome.digest,
                "violation": None if found is None else _as_dict(found),
            }
        )
    elif found is None:
        print(f"{args.replay}: {outcome.steps} steps, no rule is broken")
    else:
        print(f"{args.replay}: step {found.step} breaks {found.check}: {found.message}")
    return 0 if found is None else 1


def shrink_failure(failure: Failure) -> Failure:
    """The smallest case that breaks the same rule, and how it breaks it."""
    from twostep.sim.campaign import Failure
    from twostep.sim.shrink import shrink
    from twostep.sim.simulation import run_case

    print(f"seed {failure.case.seed}: {failure.found.message}; shrinking …", file=sys.stderr)
    if failure.found.check == "I20":
        return failure  # what differs from run to run cannot be cut down
    case = shrink(failure.case)
    found = run_case(case).violation
    assert found is not None
    return Failure(case=case, found=found)


def describe(case: Case) -> str:
    """The case as a test."""
    return "\n" + case.as_test(f"seed_{case.seed}")


def save(case: Case, name: str) -> None:
    """Keep the case for ``--replay``."""
    try:
        Path(name).write_text(case.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write --save {name}: {error.strerror}") from error
    print(f"saved: twostep simulate check --replay {name}", file=sys.stderr)


def check_folder(flag: str, name: str | None) -> None:
    """Refuse a file that cannot be written before an hour of work, not after."""
    if name is not None and not Path(name).absolute().parent.is_dir():
        raise UsageError(f"cannot write --{flag} {name}: there is no such folder")


def write_report(args: argparse.Namespace, tally: Tally) -> None:
    """The Markdown file."""
    from twostep.sim.report import markdown

    command = f"twostep simulate check --seeds {args.seeds} --steps {args.steps}"
    if args.first_seed:
        command += f" --first-seed {args.first_seed}"
    if args.mode != "both":
        command += f" --mode {args.mode}"
    try:
        Path(args.report).write_text(markdown(tally, command=command), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write --report {args.report}: {error.strerror}") from error


def document(tally: Tally, shrunk: list[Failure]) -> dict[str, Any]:
    """The JSON document. Times in seconds and microseconds."""
    return {
        "runs": tally.seeds,
        "steps": tally.steps,
        "counts": dict(sorted(tally.counts.items())),
        "sometimes": tally.sometimes,
        "us_per_step": round(tally.microseconds_per_step, 1),
        "cpu_s": round(tally.cpu_seconds, 3),
        "duration_s": round(tally.seconds, 3),
        "violations": [
            {**_as_dict(failure.found), "seed": failure.case.seed, "case": _as_dict(failure.case)}
            for failure in shrunk
        ],
    }


def rows(tally: Tally) -> list[list[str]]:
    """The table for people."""
    steps = ", ".join(f"{n:,} {mode}" for mode, n in sorted(tally.steps.items()))
    found = [
        ["runs", f"{tally.seeds:,}"],
        ["steps", steps],
        *([name, f"{n:,}"] for name, n in sorted(tally.counts.items())),
        ["CPU time of a step", f"{tally.microseconds_per_step:.0f} µs, all checks on"],
        ["time", f"{tally.seconds:.1f} s"],
        ["violations", str(len(tally.failures))],
    ]
    for failure in tally.failures:
        where = f"seed {failure.case.seed}, step {failure.found.step}"
        found.append([failure.found.check, f"{where}: {failure.found.message}"])
    return found


def _as_dict(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value)
