"""What a user may call a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from twostep.entrypoints import resolve as module
from twostep.entrypoints import store
from twostep.entrypoints.catalogue import CATALOGUE
from twostep.entrypoints.resolve import default_sampling, looks_like_model, resolve


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def put_on_disk(name: str) -> Path:
    """A file of the right length where the store keeps the model."""
    [entry] = [entry for entry in CATALOGUE if entry.name == name]
    path = store.path_of(entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(entry.size_bytes)
    return path


def test_name_on_disk() -> None:
    path = put_on_disk("smollm2-135m")
    found = resolve("SmolLM2-135M")
    assert (found.path, found.format) == (path, "gguf")
    assert found.entry is CATALOGUE[0]


def test_gguf_file(gguf: Path) -> None:
    found = resolve(str(gguf))
    assert (found.path, found.format, found.entry) == (gguf, "gguf", None)
    assert resolve(gguf).path == gguf


def test_directory(directory: Path) -> None:
    found = resolve(str(directory))
    assert (found.path, found.format) == (directory, "hf")


def test_directory_with_one_gguf(tmp_path: Path, gguf: Path) -> None:
    assert resolve(str(tmp_path)).path == gguf
    (tmp_path / "second.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="2 .gguf files"):
        resolve(str(tmp_path))


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no config.json"):
        resolve(str(tmp_path))


def test_other_file(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"pickle")
    with pytest.raises(UnsupportedModelError, match="no .gguf file"):
        resolve(str(path))


@pytest.mark.parametrize("name", ["./nothing", "/no/such", "no.gguf", "a/b.GGUF", "~/nothing"])
def test_missing_path_is_not_taken_for_a_repository(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        resolve(name)


def test_repository(fake_hub: Any) -> None:
    fake_hub.repos["org/model"] = {"config.json": b"{}", "model.safetensors": b"w"}
    found = resolve("org/model")
    assert found.format == "hf"
    assert (found.path / "model.safetensors").exists()
    fake_hub.repos["org/one"] = {"one-Q8_0.gguf": b"GGUF"}
    assert resolve("org/one:Q8_0").format == "gguf"


def test_existing_path_before_repository(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fake_hub: Any
) -> None:
    monkeypatch.chdir(directory.parent.parent)
    relative = directory.relative_to(directory.parent.parent)
    assert resolve(str(relative)).path == relative
    assert fake_hub.requests == []


def test_slip_gets_near_names() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2-135m"):
        resolve("smolm2-135m")
    with pytest.raises(ModelNotFoundError, match="twostep models"):
        resolve("llama")


@pytest.mark.parametrize(
    ("text", "is_model"),
    [
        ("smollm2-135m", True),
        ("model.gguf", True),
        ("./dir", True),
        ("org/name", True),
        ("org/name:Q8_0", True),
        ("What is the capital of France?", False),
        ("hello", False),
        ("and/or what", False),
        ("", False),
    ],
)
def test_looks_like_model(text: str, is_model: bool) -> None:
    assert looks_like_model(text) is is_model


def test_default_sampling(directory: Path, gguf: Path) -> None:
    put_on_disk("smollm2-135m")
    assert default_sampling(resolve("smollm2-135m")).temperature == 0.2
    assert default_sampling(resolve(str(gguf))).temperature == 1.0
    assert default_sampling(resolve(str(directory))).temperature == 1.0
    config = directory / "generation_config.json"
    config.write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": 20}))
    found = default_sampling(resolve(str(directory)))
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.95, 20)


@pytest.mark.parametrize("text", ["{", '{"temperature": "hot"}', "[]"])
def test_broken_generation_config(directory: Path, text: str) -> None:
    (directory / "generation_config.json").write_text(text)
    with pytest.raises(ModelFileError, match="generation_config.json is not valid"):
        default_sampling(resolve(str(directory)))


def test_catalogue_name_never_opens_the_network_when_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_on_disk("smollm2-135m")
    monkeypatch.setattr(module.hub, "is_reachable", lambda *a: pytest.fail("network"))
    resolve("smollm2-135m")
