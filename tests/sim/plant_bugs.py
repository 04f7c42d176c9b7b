"""Plant bugs into a copy of the engine and see which check of the simulator catches each.

    python tests/sim/plant_bugs.py [--only WORD] [--jobs N] [--report docs/planted-bugs.md]

The checkout is not touched: the package's Python files are copied to a temporary folder, the bug
is planted there, and a process of its own imports the copy.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from planted_bugs import BUGS, PlantedBug

PACKAGE = pathlib.Path(__file__).parents[2] / "src" / "twostep"
PARTS = ("config", "contracts", "engine", "kv_cache", "runner", "scheduler", "sim")
MAX_STEPS = 400_000
"""Steps without a violation after which a bug counts as missed."""

HUNT = """
import json, sys
# An editable installation would find the package itself, not the copy.
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
sys.path.insert(0, sys.argv[1])
import twostep.sim.campaign as campaign
assert campaign.__file__.startswith(sys.argv[1]), campaign.__file__
steps, most = 0, int(sys.argv[2])
seed = 0
while steps < most:
    task = campaign.Task(seeds=(seed,), modes=(False, True), steps=500)
    tally = campaign.run_task(task)
    steps += tally.total_steps
    if tally.failures:
        found = tally.failures[0].found
        print(json.dumps({"check": found.check, "message": found.message, "steps": steps}))
        break
    seed += 1
else:
    print(json.dumps({"check": None, "message": "", "steps": steps}))
"""


@dataclasses.dataclass(frozen=True)
class Hunt:
    """What became of a bug."""

    bug: PlantedBug
    check: str | None
    """None: missed."""
    message: str
    steps: int
    """Simulated until it was caught."""


def plant(bug: PlantedBug, folder: pathlib.Path) -> None:
    """Copy the planning half to ``folder``/twostep, with the bug. Raises if it does not fit."""
    package = folder / "twostep"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for part in PARTS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE / part, package / part, ignore=ignored)
    path = package / bug.file
    source = path.read_text()
    if source.count(bug.old) != 1:
        raise ValueError(
            f"{bug.name!r} stands {source.count(bug.old)} times in {bug.file}: plant it anew"
        )
    path.write_text(source.replace(bug.old, bug.new))


def hunt(bug: PlantedBug, max_steps: int = MAX_STEPS) -> Hunt:
    """Simulate with the bug until a check fails."""
    with tempfile.TemporaryDirectory() as folder:
        plant(bug, pathlib.Path(folder))
        done = subprocess.run(
            [sys.executable, "-c", HUNT, folder, str(max_steps)],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
    if done.returncode:
        raise RuntimeError(f"{bug.name!r}: the simulator itself failed\n{done.stderr}")
    return Hunt(bug=bug, **json.loads(done.stdout))


def report(hunts: list[Hunt]) -> str:
    """The table for docs/."""
    caught = sum(h.check is not None for h in hunts)
    lines = [
        "# Planted bugs",
        "",
        "`python tests/sim/plant_bugs.py --report docs/planted-bugs.md`",
        "",
        f"**{caught} of {len(hunts)} caught.** Each bug is a change of a few characters in a copy "
        "of the engine. The simulator runs seeds from 0, each in both modes, until a check fails;",
        "what the checks are stands in [simulator.md](simulator.md).",
        "",
        "| bug | file | caught by | after steps |",
        "|---|---|---|---|",
        *(
            f"| {h.bug.name} | {h.bug.file} | {h.check or '**missed**'} | {h.steps:,} |"
            for h in hunts
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Hunt all bugs; returns 1 if one was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="bugs with this in their name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--report", metavar="FILE", help="write the table as Markdown")
    args = parser.parse_args()
    bugs = [bug for bug in BUGS if args.only in bug.name]
    hunts = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(hunt, bugs):
            print(f"{found.check or 'MISSED':9} {found.steps:>9,}  {found.bug.name}", flush=True)
            hunts.append(found)
    missed = [h.bug.name for h in hunts if h.check is None]
    print(f"{len(hunts) - len(missed)} of {len(hunts)} caught")
    if args.report:
        pathlib.Path(args.report).write_text(report(hunts))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
