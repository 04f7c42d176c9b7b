"""The collector rests while an engine is made, and is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from twostep.entrypoints.garbage import no_garbage


@pytest.fixture(autouse=True)
def collector_as_found() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if was_enabled else gc.disable)()


def test_what_is_made_inside_is_never_looked_at() -> None:
    gc.enable()
    before = gc.get_freeze_count()
    with no_garbage():
        assert not gc.isenabled()
        made = [[i] for i in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() - before >= len(made)


def test_a_failed_start_leaves_the_collector_on_and_freezes_nothing() -> None:
    gc.enable()
    before = gc.get_freeze_count()
    with pytest.raises(ValueError, match="no model"), no_garbage():
        raise ValueError("no model")
    assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_whoever_turned_it_off_finds_it_off() -> None:
    gc.disable()
    with no_garbage():
        pass
    assert not gc.isenabled()
