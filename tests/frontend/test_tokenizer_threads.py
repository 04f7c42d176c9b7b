"""Texts encoded at the same time: the same ids, and nobody waits for another's long text."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers.tiny_models import tiny_hf_dir
from helpers.tiny_text import gguf_tokenizer

from twostep.frontend.tokenizer import LONG_TEXT_CHARS, LibraryEncoder, Tokenizer, _twin_of

SHORT = "<|im_start|>hello 日本 there<|im_end|>the end \U0001f600"
LONG = SHORT * (LONG_TEXT_CHARS // len(SHORT) + 1)


def from_gguf(_: Path) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(gguf_tokenizer())


def from_dir(folder: Path) -> Tokenizer:
    return Tokenizer.from_dir(tiny_hf_dir(folder, "llama"))


@pytest.mark.parametrize("make", [from_gguf, from_dir])
def test_both_ways_of_reading_stay_what_they_were(
    tmp_path: Path, make: Callable[[Path], Tokenizer]
) -> None:
    tokenizer = make(tmp_path)
    cases = [(text, way) for text in (SHORT, LONG, "") for way in (True, False, True)]
    before = [tokenizer.encode(text, parse_special=way) for text, way in cases]
    assert before[0] != before[1]  # the two ways differ
    assert before[0] == before[2]
    tokenizer.serve_threads()
    tokenizer.serve_threads()
    assert [tokenizer.encode(text, parse_special=way) for text, way in cases] == before


def test_a_long_text_is_encoded_as_a_short_one(tmp_path: Path) -> None:
    """By another function of the library, without the interpreter lock."""
    tokenizer = from_dir(tmp_path)
    assert tokenizer.encode(LONG, False) == tokenizer.encode(SHORT, False) * (
        len(LONG) // len(SHORT)
    )


class Library:
    """A tokenizer whose first text takes until ``go``."""

    encode_special_tokens = False
    model = normalizer = pre_tokenizer = None

    def __init__(self, model: object = None) -> None:
        self.is_in = threading.Event()
        self.go = threading.Event()

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        if text == "slow":
            self.is_in.set()
            assert self.go.wait(30)
        return type("Encoding", (), {"ids": [len(text)]})

    def get_added_tokens_decoder(self) -> dict[int, object]:
        return {}


def with_added_tokens(first_id: int) -> tokenizers.Tokenizer:
    """A tokenizer with two added tokens from this id on."""
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<end>"])
    library.add_tokens(["word"])
    description = json.loads(library.to_str())
    for number, token in enumerate(description["added_tokens"]):
        token["id"] = first_id + number
    return tokenizers.Tokenizer.from_str(json.dumps(description))


@pytest.mark.parametrize("first_id", [3, 40])
def test_a_twin_has_the_same_ids(first_id: int) -> None:
    """Also where ids have a hole, which adding tokens again would fill."""
    library = with_added_tokens(first_id)
    expected = repr(sorted(library.get_added_tokens_decoder().items()))
    twin = _twin_of(library)
    assert repr(sorted(twin.get_added_tokens_decoder().items())) == expected
    for text in ("a b <end> word", "word<end>", ""):
        assert twin.encode(text).ids == library.encode(text).ids
    twin.encode_special_tokens = True
    assert library.encode("<end>").ids != twin.encode("<end>").ids


@pytest.mark.parametrize("way", [True, False])
def test_nobody_waits_for_another_text(way: bool) -> None:
    library = Library()
    encoder = LibraryEncoder(library)  # type: ignore[arg-type]
    encoder.serve_threads()
    thread = threading.Thread(target=encoder.encode, args=("slow", True))
    thread.start()
    assert library.is_in.wait(30)
    assert encoder.encode("quick", way) == [5]
    library.go.set()
    thread.join()
