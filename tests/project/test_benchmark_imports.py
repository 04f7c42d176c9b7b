"""What benchmarks import from the package exists, also where they import it only when they run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
NATIVE = importlib.util.find_spec("twostep._native") is not None


def imports_of(file: Path) -> list[tuple[str, str]]:
    """(module, name) of each ``from twostep… import name``, wherever it stands."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
        if node.module.split(".")[0] in ("twostep", "benchmarks")
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imported_names_exist(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    for module, name in imports_of(file):
        if name == "_native" and not NATIVE:
            continue
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), (
            f"{file.name}: {module} has no {name}"
        )


def test_a_name_that_moved_would_be_found() -> None:
    imports = {pair for file in FILES for pair in imports_of(file)}
    assert ("twostep.entrypoints.text_side", "load_tokenizer") in imports
