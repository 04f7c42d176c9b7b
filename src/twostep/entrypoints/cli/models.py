"""``twostep models``: the models that have a name."""

from __future__ import annotations

from typing import Any

from twostep.entrypoints import store
from twostep.entrypoints.catalogue import CATALOGUE, CatalogueModel
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console
from twostep.entrypoints.progress import format_bytes

DESCRIPTION = """\
List the models that have a name. Beside these, every command takes a .gguf file, a directory in
Hugging Face layout, or a Hub repository (org/name, org/name:Q8_0).
"""


def run(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = cli_args.Parser("twostep models", "", DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse(argv)
    if args.json:
        console.print_json([facts(model) for model in CATALOGUE])
        return 0
    rows = [["name", "size", "licence", "on disk", "what"]]
    rows += [
        [
            model.name,
            format_bytes(model.size_bytes),
            model.licence,
            str(store.path_of(model)) if store.is_present(model) else "no",
            model.description,
        ]
        for model in CATALOGUE
    ]
    print(console.table(rows))
    return 0


def facts(model: CatalogueModel) -> dict[str, Any]:
    """One model, for JSON."""
    present = store.is_present(model)
    return {
        "name": model.name,
        "description": model.description,
        "licence": model.licence,
        "size_bytes": model.size_bytes,
        "sha256": model.sha256,
        "downloaded": present,
        "path": str(store.path_of(model)) if present else None,
    }
