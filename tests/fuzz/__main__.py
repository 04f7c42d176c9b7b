"""Send nearly valid requests to a live server until something breaks.

    python tests/fuzz --requests 100000 [--seed 1] [--report docs/fuzz-report.md]

Starts ``twostep serve`` on a tiny random model (two processes, native kernels), sends what a seed
and a number make (`cases.py`), and holds every answer against `rules.py`. What breaks is made small
and printed as a line for a shell. ``--only N`` sends one case of the seed and prints the answer.
Exit code 1: something broke.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.cases import make_case  # noqa: E402
from fuzz.session import SERVER_FLAGS, Report, Session  # noqa: E402
from fuzz.wire import Connection  # noqa: E402
from helpers.serve_process import ServeProcess  # noqa: E402
from helpers.tiny_models import tiny_hf_dir  # noqa: E402
from tqdm import tqdm  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=16, help="connections (default 16)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write Markdown")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case of the seed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_hf_dir(Path(folder), "qwen3")
        server = ServeProcess(str(model), *SERVER_FLAGS)
        try:
            if args.only is not None:
                asyncio.run(show(server, args.seed, args.only))
                return 0
            session = Session(server, args.seed, concurrency=args.concurrency)
            with tqdm(total=args.requests, unit=" requests", disable=None) as bar:
                report = asyncio.run(session.run(args.requests, bar.update))
        finally:
            if server.child.poll() is None:
                server.end()
    text = markdown(report, args.concurrency)
    print(text)
    if args.report is not None:
        args.report.write_text(text)
    return 0 if report.is_clean else 1


async def show(server: ServeProcess, seed: int, number: int) -> None:
    case = make_case(seed, number)
    print(case.curl()[:4000])
    connection = Connection(int(server.url.rpartition(":")[2]))
    print(await connection.exchange(case))
    connection.close()


def markdown(report: Report, concurrency: int) -> str:
    """The report as a document."""
    lines = [
        "# Fuzzing the server",
        "",
        f"`python tests/fuzz --requests {report.requests} --seed {report.seed}`",
        "",
        f"**{len(report.findings)} requests broke a rule** of {report.requests:,}, sent over "
        f"{concurrency} connections in {report.seconds:.0f} s. After them: "
        f"{'; '.join(report.after) or 'healthy, idle, the same engine core, no traceback'}.",
        "",
        "A request is a body that is right, with a value, a type, a field, its bytes or its HTTP",
        "changed, and some clients leave in the middle. Rules: no status of 500 or above, an",
        "answer within 60 s, errors of the documented form without paths or addresses, streams",
        "that end once and with `[DONE]`, usage that adds up; every 500 requests a plain one gets",
        "the text it got at first.",
        "",
        *_table("what came", report.outcomes),
        "",
        *_table("asked for", report.paths, most=20),
    ]
    for finding in report.findings:
        smallest = finding.smallest or finding.case
        lines += ["", f"## Case {finding.case.number}", "", finding.what, ""]
        lines += ["```", smallest.curl()[:4000], "```"]
    return "\n".join(lines) + "\n"


def _table(title: str, counts: dict[str, int], most: int = 1000) -> list[str]:
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"| {title} | times |", "|---|---|"]
    lines += [f"| {name.replace('|', ' ')} | {count:,} |" for name, count in rows[:most]]
    if rest := sum(count for _, count in rows[most:]):
        lines.append(f"| (others) | {rest:,} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
