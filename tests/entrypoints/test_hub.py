"""Hub repositories, fetched by the real client from a server on loopback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from twostep.entrypoints import hub
from twostep.entrypoints.progress import Lines, Silent

LAYOUT = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "README.md": b"# readme",
    "modeling_evil.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "original/params.json": b"{}",
}


@pytest.mark.parametrize(
    ("text", "repo", "quant"),
    [
        ("org/name", "org/name", None),
        ("org/na.me-1_x:Q8_0", "org/na.me-1_x", "Q8_0"),
    ],
)
def test_parse(text: str, repo: str, quant: str | None) -> None:
    assert hub.parse(text) == hub.Repository(repo, quant)
    assert str(hub.Repository(repo, quant)) == text


@pytest.mark.parametrize("text", ["name", "a/b/c", "a b/c", "org/", "/name", "a/b:", "a/b:c:d", ""])
def test_parse_refuses(text: str) -> None:
    assert hub.parse(text) is None


def test_repository_in_hugging_face_layout(fake_hub: Any) -> None:
    """Weights, config and tokenizer come; code and pickles never do."""
    fake_hub.repos["org/model"] = LAYOUT
    path = hub.fetch(hub.Repository("org/model"), Silent())
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (path / "model.safetensors").read_bytes() == b"weights"


def test_cached_repository_opens_no_network(fake_hub: Any) -> None:
    fake_hub.repos["org/model"] = LAYOUT
    first = hub.fetch(hub.Repository("org/model"), Silent())
    fake_hub.requests.clear()
    assert hub.fetch(hub.Repository("org/model"), Silent()) == first
    assert fake_hub.requests == []


def test_refresh_asks_the_hub(fake_hub: Any) -> None:
    fake_hub.repos["org/model"] = LAYOUT
    hub.fetch(hub.Repository("org/model"), Silent())
    fake_hub.requests.clear()
    hub.fetch(hub.Repository("org/model"), Silent(), refresh=True)
    assert fake_hub.requests


def test_incomplete_cache_is_completed(fake_hub: Any) -> None:
    """A missing shard is noticed and fetched, not left for the loader to stumble over."""
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    fake_hub.repos["org/big"] = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": b"1",
        "model-2.safetensors": b"22",
    }
    path = hub.fetch(hub.Repository("org/big"), Silent())
    (path / "model-2.safetensors").unlink()
    assert hub.find_cached(hub.Repository("org/big")) is None
    path = hub.fetch(hub.Repository("org/big"), Silent())
    assert (path / "model-2.safetensors").read_bytes() == b"22"


def test_gguf_by_quantisation(fake_hub: Any) -> None:
    fake_hub.repos["org/m-GGUF"] = {"m.Q8_0.gguf": b"8", "m-Q4_K_M.gguf": b"4", "m-Q4_0.gguf": b"0"}
    assert hub.fetch(hub.Repository("org/m-GGUF", "q8_0"), Silent()).read_bytes() == b"8"
    assert hub.fetch(hub.Repository("org/m-GGUF"), Silent()).read_bytes() == b"4"
    assert sum("resolve" in r and "Q4_0" in r for r in fake_hub.requests) == 0


def test_another_quantisation_in_the_cache_is_not_taken_for_it(fake_hub: Any) -> None:
    """With Q8_0 in the cache, plain org/name still means Q4_K_M; unless the Hub is gone."""
    fake_hub.repos["org/m-GGUF"] = {"m-Q8_0.gguf": b"8", "m-Q4_K_M.gguf": b"4"}
    only = hub.fetch(hub.Repository("org/m-GGUF", "Q8_0"), Silent())
    assert hub.find_cached(hub.Repository("org/m-GGUF")) is None
    assert hub.find_cached(hub.Repository("org/m-GGUF"), guess=True) == only
    assert hub.fetch(hub.Repository("org/m-GGUF"), Silent()).read_bytes() == b"4"


def test_dead_hub_does_not_stop_a_refresh(
    fake_hub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.repos["org/model"] = LAYOUT
    first = hub.fetch(hub.Repository("org/model"), Silent())
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    again = hub.fetch(hub.Repository("org/model"), Lines(sys.stderr), refresh=True)
    assert again == first
    assert "does not answer" in capsys.readouterr().err


def test_unknown_repository(fake_hub: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="no repository org/none"):
        hub.fetch(hub.Repository("org/none"), Silent())


def test_gated_repository(fake_hub: Any) -> None:
    fake_hub.gated.add("org/gated")
    with pytest.raises(ModelNotFoundError, match="accept its terms.*HF_TOKEN"):
        hub.fetch(hub.Repository("org/gated"), Silent())


def test_dead_hub_is_told_at_once() -> None:
    """The client's own retries would take half a minute."""
    with pytest.raises(ModelError, match="does not answer"):
        hub.fetch(hub.Repository("org/model"), Silent())


@pytest.mark.parametrize("variable", ["TWOSTEP_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline(fake_hub: Any, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    fake_hub.repos["org/model"] = LAYOUT
    with pytest.raises(ModelNotFoundError, match="twostep pull org/model"):
        hub.fetch(hub.Repository("org/model"), Silent())
    assert fake_hub.requests == []


def test_offline_uses_the_cache(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub.repos["org/model"] = LAYOUT
    first = hub.fetch(hub.Repository("org/model"), Silent())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.fetch(hub.Repository("org/model"), Silent(), refresh=True) == first


def test_fetch_file(fake_hub: Any, tmp_path: Path) -> None:
    fake_hub.repos["org/one"] = {"m.gguf": b"x" * 1000}
    file = hub.HubFile(repo="org/one", filename="m.gguf")
    path = hub.fetch_file(file, 1000, tmp_path, Silent())
    assert path == tmp_path / "m.gguf"
    assert path.read_bytes() == b"x" * 1000


def test_fetch_file_that_is_not_there(fake_hub: Any, tmp_path: Path) -> None:
    fake_hub.repos["org/one"] = {}
    with pytest.raises(ModelNotFoundError, match="org/one lacks a file"):
        hub.fetch_file(hub.HubFile(repo="org/one", filename="m.gguf"), 1, tmp_path, Silent())


@pytest.mark.parametrize(
    ("names", "quant", "chosen"),
    [
        (["a.gguf"], None, "a.gguf"),
        (["a-Q4_K_M.gguf", "a-Q8_0.gguf"], None, "a-Q4_K_M.gguf"),
        (["a-Q4_K_M.gguf", "a-Q8_0.gguf"], "q8_0", "a-Q8_0.gguf"),
        (["a.gguf", "mmproj-a.gguf"], None, "a.gguf"),
        (["a-Q4_0.gguf", "a-IQ4_0.gguf"], "Q4_0", "a-Q4_0.gguf"),
    ],
)
def test_choose_gguf(names: list[str], quant: str | None, chosen: str) -> None:
    assert hub.choose_gguf(hub.Repository("o/n", quant), names) == chosen


def test_choose_gguf_lists_the_candidates() -> None:
    with pytest.raises(ModelNotFoundError, match=r"o/n has no Q4_K_M file.*a-Q5_0.*a-Q8_0"):
        hub.choose_gguf(hub.Repository("o/n"), ["a-Q8_0.gguf", "a-Q5_0.gguf"])
    with pytest.raises(ModelNotFoundError, match="fits several files"):
        hub.choose_gguf(hub.Repository("o/n", "Q8_0"), ["a-Q8_0.gguf", "b-Q8_0.gguf"])


def test_choose_gguf_refuses_split_files() -> None:
    names = ["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"]
    with pytest.raises(UnsupportedModelError, match="split over several"):
        hub.choose_gguf(hub.Repository("o/n", "Q8_0"), names)


def test_pickles_are_no_model() -> None:
    with pytest.raises(UnsupportedModelError, match="no .gguf file and no config.json"):
        hub.choose_files(hub.Repository("o/n"), ["config.json", "pytorch_model.bin"])
