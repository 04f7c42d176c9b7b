"""Which kind of model a path holds."""

from __future__ import annotations

from pathlib import Path

from twostep.contracts.errors import ModelFileError, ModelNotFoundError
from twostep.models.loader.checkpoint import Checkpoint
from twostep.models.loader.gguf_checkpoint import GGUFCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Map a ``.gguf`` file (any part of a split one) or a directory in Hugging Face layout.

    Reads headers only; weights are paged in when a backend packs them.

    Raises:
        ModelNotFoundError: Nothing is there.
        ModelFileError: Missing parts, truncated or corrupt; names file and field.
        UnsupportedModelError: Architecture, format or feature not built.
    """
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or directory; check the path")
    if path.is_dir():
        from twostep.models.loader.hf_checkpoint import HFCheckpoint  # not for a GGUF file's start

        _require_config(path)
        return HFCheckpoint(path)
    if path.suffix != ".gguf" and path.name in ("config.json", "model.safetensors"):
        raise ModelFileError(f"{path}: is one file of a model; give its directory {path.parent}")
    return GGUFCheckpoint(path)


def _require_config(directory: Path) -> None:
    if (directory / "config.json").exists():
        return
    ggufs = sorted(directory.glob("*.gguf"))
    cure = f"give the file, {ggufs[0]}" if ggufs else "give the directory that holds config.json"
    raise ModelFileError(f"{directory}: config.json: is missing; {cure}")
