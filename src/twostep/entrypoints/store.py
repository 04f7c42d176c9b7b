"""The folder where models fetched by name lie: one file each, checked before it gets its name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from twostep.contracts.errors import ModelError, ModelFileError
from twostep.entrypoints import environment
from twostep.entrypoints.catalogue import CatalogueModel
from twostep.entrypoints.progress import Reporter, format_bytes


def folder() -> Path:
    """Where the files lie; may not exist yet."""
    return environment.home() / "models"


def path_of(model: CatalogueModel) -> Path:
    """Where the model's file lies, or will."""
    return folder() / model.filename


def is_present(model: CatalogueModel) -> bool:
    """Whether the file is there in full length. Its hash was checked when it came."""
    try:
        return path_of(model).stat().st_size == model.size_bytes
    except OSError:
        return False


@contextlib.contextmanager
def exclusive(model: CatalogueModel, reporter: Reporter) -> Iterator[None]:
    """Hold the model's lock: of two processes that want the same file only one fetches it."""
    with writing_errors():
        folder().mkdir(parents=True, exist_ok=True)
        lock = path_of(model).with_suffix(".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            reporter.note(f"waiting for another process that is fetching {model.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def workspace(model: CatalogueModel) -> Iterator[Path]:
    """An empty folder beside the models that goes when the block ends, whatever happens.

    Enter it only inside :func:`exclusive`: what a killed process left there is removed first.
    """
    work = folder() / f".fetch-{model.name}"
    with writing_errors():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def require_space(num_bytes: int) -> None:
    """Raise unless the disk of the store has that much free."""
    free = shutil.disk_usage(folder()).free
    if free < num_bytes:
        raise ModelError(
            f"not enough disk space in {folder()}: {format_bytes(num_bytes)} needed, "
            f"{format_bytes(free)} free; free some or set TWOSTEP_HOME to a larger disk"
        )


def verify(path: Path, model: CatalogueModel, origin: str) -> None:
    """Raise unless the file has the model's size and SHA-256."""
    size = path.stat().st_size
    if size != model.size_bytes:
        raise ModelFileError(
            f"{origin} gave {size} bytes for {model.name} where {model.size_bytes} were expected; "
            "try again, or report it if it stays so"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelFileError(
            f"{origin} gave other bytes for {model.name} than expected "
            f"(SHA-256 {found[:16]}…, expected {model.sha256[:16]}…); nothing was kept: "
            "try again, or report it if it stays so"
        )


def keep(path: Path, model: CatalogueModel) -> Path:
    """Give a verified file its place, in one step that others see all of or nothing."""
    target = path_of(model)
    with writing_errors():
        path.chmod(0o644)
        path.replace(target)
    return target


@contextlib.contextmanager
def writing_errors() -> Iterator[None]:
    """Turn errors of the file system into one line with a cure."""
    try:
        yield
    except OSError as error:
        cure = "set TWOSTEP_HOME to a folder you can write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cure = "free some space or set TWOSTEP_HOME to a larger disk"
        raise ModelError(
            f"cannot write to {folder()}: {error.strerror or error}; {cure}"
        ) from error
