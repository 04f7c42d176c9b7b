"""Texts encoded at the same time: the same ids, and nobody waits for another's long text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import tiny_hf_dir
from helpers.tiny_text import gguf_tokenizer

from twostep.frontend.tokenizer import LONG_TEXT_CHARS, LibraryEncoder, Tokenizer

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

    def __init__(self) -> None:
        self.is_in = threading.Event()
        self.go = threading.Event()

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        if text == "slow":
            self.is_in.set()
            assert self.go.wait(30)
        return type("Encoding", (), {"ids": [len(text)]})

    def to_str(self) -> str:
        return ""

    @staticmethod
    def from_str(text: str) -> Library:
        return Library()


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
