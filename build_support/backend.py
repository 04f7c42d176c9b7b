"""The build backend: scikit-build-core, after one look for a C++ compiler.

Without a compiler CMake fails with two screens of text; this says it in one line instead.
"""

from __future__ import annotations

import compileall
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "twostep"

NO_COMPILER = (
    "twostep: error: no C++ compiler found: install one "
    "(Debian/Ubuntu: apt install g++, Fedora: dnf install gcc-c++, macOS: xcode-select --install) "
    "or point CXX at one"
)


def require_compiler() -> None:
    """Exit with one line if no C++ compiler can be found. ``CXX`` may hold flags after the name."""
    if sys.platform == "win32":
        return  # CMake finds Visual Studio, which is not on PATH
    chosen = os.environ.get("CXX", "").split()
    names = chosen[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        raise SystemExit(NO_COMPILER)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """What the build needs beside build-system.requires: cmake and ninja, if they are missing."""
    require_compiler()
    return _build.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """As for a wheel."""
    require_compiler()
    return _build.get_requires_for_build_editable(config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel; returns its file name."""
    require_compiler()
    return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the editable wheel; returns its file name.

    The sources are compiled to bytecode, as pip does with what it installs: where
    PYTHONDONTWRITEBYTECODE is set nobody else would, and every start would take 0.2 s longer.
    """
    require_compiler()
    compileall.compile_dir(PACKAGE, quiet=1)
    return _build.build_editable(wheel_directory, config_settings, metadata_directory)
