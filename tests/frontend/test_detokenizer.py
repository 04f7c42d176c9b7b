"""Incremental detokenisation."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.frontend.detokenizer import IncrementalDetokenizer
from twostep.frontend.tokenizer import Tokenizer

IDS = st.lists(st.integers(min_value=-2, max_value=400), max_size=30)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The ids that spell bytes one by one."""
    by_bytes = {tokenizer.token_bytes[i]: i for i in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in data]


def pieces(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.decode(i) for i in ids), detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_pieces_join_to_the_whole(any_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(any_tokenizer, (), skip)
    assert "".join(pieces(detokenizer, ids)) == any_tokenizer.decode(ids, skip)


@settings(max_examples=150, deadline=None)
@given(prompt=IDS, ids=IDS, skip=st.booleans())
def test_b20_prompt_and_text_join_to_the_whole(
    any_tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool
) -> None:
    seen = [i for i in prompt if not (skip and any_tokenizer.is_special(i))]
    data = b"".join(any_tokenizer.token_bytes[i] for i in seen)
    tail = IncrementalDetokenizer(any_tokenizer, prompt, skip).pending
    detokenizer = IncrementalDetokenizer(any_tokenizer, prompt, skip)
    text = "".join(pieces(detokenizer, ids))
    if not tail:
        whole = any_tokenizer.decode([*prompt, *ids], skip)
        assert any_tokenizer.decode(prompt, skip) + text == whole
    else:  # B19: a prompt that ends inside a character
        assert data.endswith(tail)
        out = b"".join(
            any_tokenizer.token_bytes[i] for i in ids if not (skip and any_tokenizer.is_special(i))
        )
        assert text in ((tail + out).decode("utf-8", "replace"), out.decode("utf-8", "replace"))


@pytest.mark.parametrize("text", ["👩‍👩‍👧 家 ñ 🇩🇪", "日本語", "a🌶b", "é"])
def test_b21_no_half_characters(any_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_ids(any_tokenizer, text.encode())
    shown = pieces(IncrementalDetokenizer(any_tokenizer, ids), ids)
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)


def test_case_58_three_byte_character(any_tokenizer: Tokenizer) -> None:
    ids = byte_ids(any_tokenizer, "家".encode())
    assert pieces(IncrementalDetokenizer(any_tokenizer, ids), ids) == ["", "", "家", ""]


def test_b21_a_cut_character_is_one_replacement_in_both_modes(any_tokenizer: Tokenizer) -> None:
    ids = byte_ids(any_tokenizer, "a🌶".encode()[:-1])
    assert pieces(IncrementalDetokenizer(any_tokenizer), ids) == ["a", "", "", "", "\ufffd"]
    assert any_tokenizer.decode(ids) == "a\ufffd"


def test_b19_prompt_that_ends_inside_a_character(any_tokenizer: Tokenizer) -> None:
    ids = byte_ids(any_tokenizer, "Hello world 🌶 and".encode())
    cut = len(b"Hello world ") + 2
    completed = IncrementalDetokenizer(any_tokenizer, ids[:cut])
    assert "".join(pieces(completed, ids[cut:])) == "🌶 and"
    abandoned = IncrementalDetokenizer(any_tokenizer, ids[:cut])
    assert "".join(pieces(abandoned, byte_ids(any_tokenizer, b"xy"))) == "xy"
    nothing = IncrementalDetokenizer(any_tokenizer, ids[:cut])
    assert pieces(nothing, []) == [""]


def test_a_prompt_may_end_inside_the_replacement_character(any_tokenizer: Tokenizer) -> None:
    ids = byte_ids(any_tokenizer, "\ufffd".encode())
    detokenizer = IncrementalDetokenizer(any_tokenizer, ids[:2])
    assert "".join(pieces(detokenizer, ids[2:])) == "\ufffd"


def test_space_of_the_first_token(space_prefixed: Tokenizer) -> None:
    word = space_prefixed.encode("world", add_special_tokens=False)
    bos = [2]
    after_nothing = IncrementalDetokenizer(space_prefixed, bos)
    assert "".join(pieces(after_nothing, word * 2)) == "world world"
    after_text = IncrementalDetokenizer(space_prefixed, bos + word)
    assert "".join(pieces(after_text, word)) == " world"
    shown = IncrementalDetokenizer(space_prefixed, bos, skip_special_tokens=False)
    assert "".join(pieces(shown, word)) == " world"


def test_special_tokens_are_hidden_only_if_asked(any_tokenizer: Tokenizer) -> None:
    eos = any_tokenizer.eos_token_id
    assert eos is not None
    name = any_tokenizer.token_text(eos)
    assert re.fullmatch(r"<.*>", name)
    assert IncrementalDetokenizer(any_tokenizer).decode(eos) == ""
    assert IncrementalDetokenizer(any_tokenizer, (), False).decode(eos) == name


def test_a_hidden_token_does_not_part_a_character(any_tokenizer: Tokenizer) -> None:
    eos = any_tokenizer.eos_token_id
    assert eos is not None
    ids = byte_ids(any_tokenizer, "家".encode())
    ids.insert(1, eos)
    assert "".join(pieces(IncrementalDetokenizer(any_tokenizer), ids)) == "家"
    assert any_tokenizer.decode(ids) == "家"


def test_b23_token_text_inside_a_character(any_tokenizer: Tokenizer) -> None:
    first, second, third = byte_ids(any_tokenizer, "家".encode())
    table = any_tokenizer.token_bytes
    assert any_tokenizer.token_text(first) == ""
    assert any_tokenizer.token_text(second, table[first]) == ""
    assert any_tokenizer.token_text(third, table[first] + table[second]) == "家"
