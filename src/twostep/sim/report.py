"""The report of a campaign: tables in Markdown, for docs/."""

from __future__ import annotations

from collections.abc import Sequence

from twostep.sim.campaign import Tally, mode_name
from twostep.sim.sometimes import SOMETIMES
from twostep.sim.violation import CHECKS


def markdown(tally: Tally, *, command: str) -> str:
    """The whole report. ``command``: what makes it again."""
    violations = len(tally.failures)
    lines = [
        "# Simulation report",
        "",
        f"`{command}`",
        "",
        f"**{violations} violations** in {tally.total_steps:,} steps of {tally.seeds:,} runs"
        f"{' (stopped by hand before the last one)' if tally.was_interrupted else ''}.",
        "What is checked and how to read a failing seed: [simulator.md](simulator.md).",
        "",
        *_table(
            ("figure", "value"),
            [
                *((f"steps, {mode}", f"{n:,}") for mode, n in sorted(tally.steps.items())),
                *((name, f"{n:,}") for name, n in sorted(tally.counts.items())),
                ("CPU time of a step, all checks on", f"{tally.microseconds_per_step:.0f} µs"),
                ("time on the clock", f"{tally.seconds / 60:.1f} min"),
            ],
        ),
        "",
        "## Things that must happen now and then",
        "",
        *_table(("event", "times"), [(name, f"{tally.sometimes[name]:,}") for name in SOMETIMES]),
        "",
        "## Checks",
        "",
        *_table(
            ("check", "rule", "violations"),
            [
                (name, rule, str(sum(f.found.check == name for f in tally.failures)))
                for name, rule in CHECKS.items()
            ],
        ),
        "",
    ]
    if tally.failures:
        lines += [
            "## Failing seeds",
            "",
            *_table(("seed", "mode", "step", "what"), _rows(tally)),
            "",
        ]
    return "\n".join(lines)


def _rows(tally: Tally) -> list[tuple[str, str, str, str]]:
    return [
        (
            str(failure.case.seed),
            mode_name(failure.case.config.is_async),
            str(failure.found.step),
            f"{failure.found.check}: {failure.found.message}",
        )
        for failure in tally.failures
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
