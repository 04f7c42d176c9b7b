"""The planning half gets time, chance and ids handed in, or a simulator could not drive it."""

from __future__ import annotations

import ast
import importlib.util
import pathlib

import pytest

FORBIDDEN = {"time", "random", "uuid", "secrets", "datetime", "asyncio", "numpy", "torch"}


def planning_files() -> list[pathlib.Path]:
    """Every module of kv_cache, scheduler and engine."""
    files = []
    for part in ("kv_cache", "scheduler", "engine"):
        # An editable install keeps modules and compiled parts in folders of their own.
        spec = importlib.util.find_spec(f"twostep.{part}")
        assert spec is not None
        assert spec.origin is not None
        files += sorted(pathlib.Path(spec.origin).parent.glob("*.py"))
    assert len(files) > 15
    return files


def imported_roots(source: str) -> set[str]:
    """Top-level names of all imports, nested ones included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", planning_files(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_nothing_ambient_is_imported(path: pathlib.Path) -> None:
    """No clock, no chance, no arrays."""
    assert not imported_roots(path.read_text()) & FORBIDDEN


def test_the_check_can_fail() -> None:
    """It sees nested and dotted imports."""
    assert imported_roots("def f():\n    import numpy.random\n    from time import time") == {
        "numpy",
        "time",
    }
