"""One line for every way in which a model file can be bad."""

from __future__ import annotations

from pathlib import Path

from twostep.contracts.errors import ModelFileError


def corrupt(path: Path, field: str, problem: str) -> ModelFileError:
    """The bytes of ``path`` contradict themselves at ``field``."""
    return ModelFileError(
        f"{path}: {_clean(field)}: {_clean(problem)}; the file is corrupt, download it again"
    )


def truncated(path: Path, field: str, needed: int, size: int) -> ModelFileError:
    """``path`` ends before what ``field`` promises."""
    return ModelFileError(
        f"{path}: {_clean(field)}: needs {needed} bytes but the file has {size}; "
        "the download was cut short, fetch it again"
    )


def missing(path: Path, what: str) -> ModelFileError:
    """A file or tensor that must be there is not."""
    return ModelFileError(
        f"{path}: {_clean(what)} is missing; the model is incomplete, download it again"
    )


def _clean(text: str) -> str:
    """Names out of a broken file may hold anything; an error stays one short printable line."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= 200 else printable[:197] + "..."
