"""The build backend's own steps, around a scikit-build-core that only notes what it is asked."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

BACKEND = Path(__file__).parents[2] / "build_support" / "backend.py"
NEED_A_COMPILER = (
    "build_editable",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_wheel",
)


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend over a package of one module; ``asked`` says what was there when it was built."""
    (tmp_path / "module.py").write_text("x = 1\n")
    asked: list[tuple[str, bool]] = []

    def noting(name: str) -> Any:
        def note(*args: object) -> str:
            asked.append((name, any(tmp_path.rglob("*.pyc"))))
            return "a.whl"

        return note

    build: Any = types.ModuleType("scikit_build_core.build")
    build.__getattr__ = noting  # any hook
    core: Any = types.ModuleType("scikit_build_core")
    core.build = build
    monkeypatch.setitem(sys.modules, "scikit_build_core", core)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", build)
    spec = importlib.util.spec_from_file_location("twostep_build_backend", BACKEND)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # as many containers have it
    module.asked = asked
    return module


def test_an_editable_install_has_its_bytecode(backend: Any) -> None:
    """Without it every start compiled the sources anew: a third of it."""
    assert backend.build_editable("wheels") == "a.whl"
    assert backend.asked == [("build_editable", True)]


@pytest.mark.parametrize("hook", NEED_A_COMPILER)
def test_a_machine_without_a_compiler_is_told_in_one_line(
    backend: Any, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    with pytest.raises(SystemExit, match="no C\\+\\+ compiler found") as caught:
        getattr(backend, hook)("wheels")
    assert "\n" not in str(caught.value)
    assert backend.asked == []
