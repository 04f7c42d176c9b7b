"""What README, CI and packaging promise, held against each other."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from twostep.entrypoints import environment
from twostep.entrypoints.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
USAGE = (ROOT / "docs" / "usage.md").read_text()

USE = 'pip install . && twostep chat "What is the capital of France?"'
TEST = "pip install -e '.[test]' && pytest"


@pytest.mark.parametrize("command", [USE, TEST])
def test_readme_first_screen(command: str) -> None:
    first_screen = README.splitlines()[:24]
    assert command in first_screen


def test_ci_runs_the_readmes_test_command() -> None:
    """CI takes the line out of the README; this is the pattern it looks for."""
    script = (ROOT / ".ci" / "run").read_text()
    match = re.search(r'grep -m 1 -x "(.*)" README.md', script)
    assert match is not None
    assert re.findall(f"^{match[1]}$", README, re.MULTILINE) == [TEST]


def test_usage_covers_commands_and_variables() -> None:
    for command, _ in COMMANDS:
        assert f"twostep {command}" in USAGE
    for names, _ in environment.VARIABLES:
        for name in names.split(", "):
            assert f"`{name}`" in USAGE


def imported_names(path: Path) -> set[str]:
    """Top-level modules that a file imports, wherever the statement stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_contracts_need_only_the_standard_library_and_msgspec() -> None:
    for path in (ROOT / "src/twostep/contracts").glob("*.py"):
        foreign = imported_names(path) - sys.stdlib_module_names - {"msgspec", "twostep"}
        assert foreign == set(), path.name


IMPORT_NAMES = {"pyyaml": "yaml"}
"""Of packages that are imported under another name."""


EXTRAS = {"matplotlib": "bench", "opentelemetry": "otel"}
"""Asked for by a flag, with a message that names the extra."""
LOADED_BY_OTHERS = {"httptools"}
"""Needed, but imported by a dependency: uvicorn's fast HTTP parser is an extra of it."""


def test_every_import_is_a_declared_dependency() -> None:
    """What the package imports is what pip installs with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=~! ]", d)[0] for d in project["dependencies"]}
    declared = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    used: set[str] = set()
    for path in (ROOT / "src" / "twostep").rglob("*.py"):
        used |= imported_names(path)
    foreign = used - sys.stdlib_module_names - {"twostep"}
    assert foreign - EXTRAS.keys() <= declared
    assert declared - LOADED_BY_OTHERS <= foreign
    for name, extra in EXTRAS.items():
        assert any(each.startswith(name) for each in project["optional-dependencies"][extra])


def planning_files() -> list[Path]:
    folders = ("engine", "scheduler", "kv_cache")
    return [p for f in folders for p in sorted((ROOT / "src" / "twostep" / f).rglob("*.py"))]


def test_planning_half_takes_clock_and_chance_as_arguments() -> None:
    """So that the simulator can drive the very code that serves."""
    banned = {"time", "random", "uuid", "secrets", "datetime"}
    for path in planning_files():
        assert imported_names(path).isdisjoint(banned), path
