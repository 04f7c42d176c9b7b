"""From what a user calls a model to where it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec

from twostep.contracts.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from twostep.entrypoints import catalogue, hub, store
from twostep.entrypoints.catalogue import CatalogueModel, DefaultSampling
from twostep.entrypoints.progress import Reporter, Silent
from twostep.entrypoints.pull import pull


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk."""

    name: str
    """What the user called it."""
    path: Path
    """A ``.gguf`` file, or a directory in Hugging Face layout."""
    format: Literal["gguf", "hf"]
    entry: CatalogueModel | None = None
    """Set if it was named after a model of the catalogue."""


def resolve(
    model: str | Path, reporter: Reporter | None = None, *, refresh: bool = False
) -> ResolvedModel:
    """Find a model by name, path or Hub repository; fetch it if it is not on disk.

    In this order: a name of the catalogue, a ``.gguf`` file, a directory with ``config.json``,
    a Hub repository ``org/name[:QUANT]``. ``refresh`` asks the Hub even if its cache has it.

    Raises:
        ModelNotFoundError: nothing of that name; says what is near.
        UnsupportedModelError: a file or directory that is no model.
        ModelError: it could not be fetched.
    """
    reporter = reporter or Silent()
    name = str(model)
    if isinstance(model, str) and (entry := catalogue.find(name)):
        return ResolvedModel(name=name, path=pull(entry, reporter), format="gguf", entry=entry)
    path = Path(name).expanduser()
    if path.exists():
        return on_disk(name, path)
    if looks_like_path(name):
        raise ModelNotFoundError(f"no such file or directory: {name}; check the path")
    if repository := hub.parse(name):
        path = hub.fetch(repository, reporter, refresh=refresh)
        return ResolvedModel(name=name, path=path, format="hf" if path.is_dir() else "gguf")
    raise unknown(name)


def find_on_disk(name: str) -> ResolvedModel | None:
    """What ``resolve`` gives, if that takes no more than a look; None for all else.

    Raises UnsupportedModelError, ModelFileError: a file or directory that is no model.
    """
    if entry := catalogue.find(name):
        if not store.is_present(entry):
            return None
        return ResolvedModel(name=name, path=store.path_of(entry), format="gguf", entry=entry)
    path = Path(name).expanduser()
    return on_disk(name, path) if path.exists() else None


def on_disk(name: str, path: Path) -> ResolvedModel:
    """A path that exists, as a model."""
    if path.is_dir():
        if (path / "config.json").exists():
            return ResolvedModel(name=name, path=path, format="hf")
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return ResolvedModel(name=name, path=files[0], format="gguf")
        found = f"{len(files)} .gguf files" if files else "no config.json and no .gguf file"
        raise ModelFileError(f"{path} has {found}: give the path of one model")
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModelError(
            f"{path} is no .gguf file: give a .gguf file, or the directory of a model that has "
            "config.json and .safetensors files"
        )
    return ResolvedModel(name=name, path=path, format="gguf")


def looks_like_path(name: str) -> bool:
    """Whether the user can only have meant a path."""
    return name.startswith(("/", "./", "../", "~")) or name.lower().endswith(".gguf")


def looks_like_model(text: str) -> bool:
    """Whether a word names a model rather than being a prompt. Opens no network."""
    if not text or any(character.isspace() for character in text):
        return False
    return (
        catalogue.find(text) is not None
        or looks_like_path(text)
        or (Path(text) / "config.json").exists()
        or hub.parse(text) is not None
    )


def unknown(name: str) -> ModelNotFoundError:
    """The error for a name that means nothing."""
    near = catalogue.near_names(name)
    hint = f"did you mean {' or '.join(near)}" if near else "`twostep models` lists the names"
    return ModelNotFoundError(
        f"no model {name!r}: {hint}? A .gguf file, a model directory or org/name works too"
        if near
        else f"no model {name!r}: {hint}; a .gguf file, a model directory or org/name works too"
    )


def default_sampling(model: ResolvedModel) -> DefaultSampling:
    """What the model's authors recommend; plain sampling at temperature 1 if they say nothing."""
    if model.entry is not None:
        return model.entry.sampling
    source = model.path / "generation_config.json"
    if model.format != "hf" or not source.exists():
        return DefaultSampling(temperature=1.0)
    try:
        given = json.loads(source.read_text())
        return DefaultSampling(
            temperature=float(given.get("temperature") or 1.0),
            top_p=float(given.get("top_p") or 1.0),
            top_k=int(given.get("top_k") or 0),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{source} is not valid: {error}; fetch it again") from error
