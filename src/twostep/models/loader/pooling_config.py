"""How a checkpoint says that its vectors are made: sentence-transformers' files, GGUF's key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from twostep.contracts.errors import UnsupportedModelError
from twostep.contracts.pooling import PoolingType
from twostep.models.loader.checkpoint import Checkpoint
from twostep.models.loader.errors import corrupt
from twostep.models.loader.fields import Fields
from twostep.models.loader.json_file import read_json, read_json_list

_MODES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_WORDS: dict[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_GGUF: dict[int, PoolingType] = {1: "mean", 2: "cls", 3: "last"}


class StoredPooling(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says; None: nothing."""

    kind: PoolingType | None = None
    normalize: bool | None = None
    max_length: int | None = None
    """Tokens of the longest text that the authors used it with."""
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()


def stored_pooling(checkpoint: Checkpoint) -> StoredPooling:
    """Read it.

    Raises:
        ModelFileError: A file is corrupt; names file and field.
        UnsupportedModelError: The vectors are made in a way that is not built.
    """
    if checkpoint.path.is_dir():
        return _from_directory(checkpoint.path, checkpoint.metadata)
    word = Fields(checkpoint.path, checkpoint.metadata).text("general.architecture")
    number = checkpoint.metadata.get(f"{word}.pooling_type", 0)
    if number in (0, None):
        return StoredPooling()
    if number not in _GGUF:
        raise UnsupportedModelError(
            f"{checkpoint.path}: {word}.pooling_type: {number} is not supported; "
            f"supported are {', '.join(f'{key} ({name})' for key, name in _GGUF.items())}"
        )
    return StoredPooling(kind=_GGUF[number])


def _from_directory(path: Path, config: Mapping[str, Any]) -> StoredPooling:
    kind, normalize = None, None
    if (path / "modules.json").exists():
        kind, normalize = _from_modules(path)
    dimensions = config.get("matryoshka_dimensions") or []
    if not isinstance(dimensions, list) or not all(
        type(each) is int and each > 0 for each in dimensions
    ):
        raise corrupt(path / "config.json", "matryoshka_dimensions", "not a list of sizes")
    return StoredPooling(
        kind=kind,
        normalize=normalize,
        max_length=_max_length(path),
        is_matryoshka=bool(dimensions) or config.get("is_matryoshka") is True,
        dimensions=tuple(sorted(dimensions)),
    )


def _from_modules(path: Path) -> tuple[PoolingType | None, bool]:
    """The pooling that follows the transformer, and whether a normalisation ends it."""
    file = path / "modules.json"
    kind: PoolingType | None = None
    normalize = False
    for module in read_json_list(file):
        word = module.get("type") if isinstance(module, dict) else None
        if not isinstance(word, str):
            raise corrupt(file, "type", "a module without a type")
        name = word.rpartition(".")[2]
        if name == "Pooling":
            kind = _pooling_kind(path / _plain(file, module.get("path")) / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise UnsupportedModelError(
                f"{file}: type: a {name} layer behind the transformer is not supported; "
                "supported are Pooling and Normalize"
            )
    return kind, normalize


def _plain(file: Path, name: Any) -> str:
    """A folder beside ``file``, and nowhere else."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise corrupt(file, "path", f"{name!r} is not a plain folder name")
    return name


def _pooling_kind(file: Path) -> PoolingType:
    values = read_json(file)
    chosen = [name for name in values if name.startswith("pooling_mode_") and values[name] is True]
    word = values.get("pooling_mode")
    if not chosen and isinstance(word, str) and word in _WORDS:
        return _WORDS[word]
    if len(chosen) == 1 and chosen[0] in _MODES:
        return _MODES[chosen[0]]
    found = " and ".join(chosen) or repr(word)
    raise UnsupportedModelError(
        f"{file}: pooling_mode: {found} is not supported; supported is one of {', '.join(_MODES)}"
    )


def _max_length(path: Path) -> int | None:
    file = path / "sentence_bert_config.json"
    if not file.exists():
        return None
    fields = Fields(file, read_json(file))
    return None if fields.get("max_seq_length") is None else fields.integer("max_seq_length")
