"""Host cost of the scheduler beside vLLM's own, driven without a model, interleaved in one run.

    python benchmarks/scheduler.py --vllm-python DIR/bin/python [--rounds 5] [--json FILE]

``benchmarks/peers/setup_vllm.sh DIR`` makes that interpreter. Each round runs both, every case in a
fresh scheduler; the figures are medians over the rounds of the mean (and of the median) time of a
step, schedule and update together. A ratio is the median of the rounds' ratios: the two of a round
run within seconds of each other, while the machine's speed drifts over minutes.
Exit code 1 if ours is above a fifth of vLLM's anywhere.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys

PEER = pathlib.Path(__file__).parent / "peers" / "vllm_scheduler.py"
LIMIT = 5.0
"""Times faster than vLLM, at least."""

Figures = dict[str, dict[str, list[float]]]
"""{case: {figure: one value for each round}}"""


def main() -> int:
    """Run the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    steps = ["--steps", str(args.steps)]
    commands = {
        "ours": [sys.executable, "-m", "twostep", "bench", "scheduler", "--json", *steps],
        "vllm": [args.vllm_python, str(PEER), *steps],
    }
    figures: dict[str, Figures] = {"ours": {}, "vllm": {}}
    for number in range(args.rounds):
        for name, command in commands.items():
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr)
            collect(run(command), figures[name])
    rows = compare(figures["ours"], figures["vllm"])
    print(table(rows))
    if args.json:
        report = {"machine": platform.processor() or platform.machine(), "rows": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(row["ratio_mean"] >= LIMIT for row in rows) else 1


def run(command: list[str]) -> list[dict[str, object]]:
    """The rows that one process measured."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    rows: list[dict[str, object]] = json.loads(done.stdout)["rows"]
    return rows


def collect(rows: list[dict[str, object]], figures: Figures) -> None:
    """Add one round's rows."""
    for row in rows:
        case = figures.setdefault(f"{'async' if row['async'] else 'sync'}, {row['case']}", {})
        for name in ("mean_us", "p50_us"):
            case.setdefault(name, []).append(float(str(row[name])))


def compare(ours: Figures, vllm: Figures) -> list[dict[str, object]]:
    """Medians over the rounds, their range, and the ratios."""
    rows = []
    for case in ours:
        row: dict[str, object] = {"case": case}
        for name in ("mean", "p50"):
            a, b = ours[case][f"{name}_us"], vllm[case][f"{name}_us"]
            row[f"ours_{name}_us"] = statistics.median(a)
            row[f"vllm_{name}_us"] = statistics.median(b)
            ratios = [theirs / mine for mine, theirs in zip(a, b, strict=True)]
            row[f"ratio_{name}"] = statistics.median(ratios)
            row[f"ratio_{name}_range"] = [min(ratios), max(ratios)]
            row[f"ours_{name}_range"] = [min(a), max(a)]
            row[f"vllm_{name}_range"] = [min(b), max(b)]
        rows.append(row)
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """For people: means, with the ratio of means and of medians."""
    lines = [f"{'µs per step (mean)':<48}{'ours':>9}{'vLLM':>10}{'ratio':>8}{'of p50':>8}"]
    for row in rows:
        lines.append(
            f"{row['case']:<48}{row['ours_mean_us']:>9.1f}{row['vllm_mean_us']:>10.1f}"
            f"{row['ratio_mean']:>7.1f}x{row['ratio_p50']:>7.1f}x"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
