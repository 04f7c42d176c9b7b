"""``twostep bench WHAT``: measure a part of the engine on this machine."""

from __future__ import annotations

import importlib

from twostep.contracts.errors import UsageError

BENCHES: tuple[tuple[str, str], ...] = (
    ("latency", "one batch of requests, from beginning to end"),
    ("throughput", "many requests at once, offline"),
    ("startup", "from the start of a process to its first token, cold and warm"),
    ("serve", "load on a running server, timed from outside: latency, throughput, goodput"),
    ("scheduler", "host cost of planning a step and taking its result, without a model"),
)
"""(name, what it measures); the module of a bench is ``bench_NAME``."""


def run(argv: list[str]) -> int:
    """Run the bench that ``argv`` names."""
    names = [name for name, _ in BENCHES]
    if not argv:
        raise UsageError(f"say what to measure: {', '.join(names)} (see `twostep bench --help`)")
    if argv[0] in ("-h", "--help"):
        print("usage: twostep bench WHAT …\n\nwhat (each has --help):")
        for name, meaning in BENCHES:
            print(f"  {name:<12}{meaning}")
        raise SystemExit(0)
    if argv[0] not in names:
        raise UsageError(f"there is no bench {argv[0]!r}: one of {', '.join(names)}")
    module = importlib.import_module(f"twostep.entrypoints.cli.bench_{argv[0]}")
    result: int = module.run(argv[1:])
    return result
