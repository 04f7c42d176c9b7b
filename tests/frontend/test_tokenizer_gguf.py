"""Tokenizers made from GGUF metadata."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.contracts.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from twostep.frontend import sentencepiece as sentencepiece_module
from twostep.frontend.added_tokens import AddedTokenMatcher
from twostep.frontend.tokenizer import Tokenizer

Make = Callable[..., dict[str, Any]]


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes[i].decode("utf-8", "replace") for i in ids]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("hello world", ["hello", " world"]),
        ("the  hello", ["the", " ", " hello"]),
        ("a12", ["a", "1", "2"]),
        ("don't", ["don", "'", "t"]),
        ("hello<|im_end|>", ["hello", "<|im_end|>"]),
        (" 日本", [" 日本"]),
    ],
)
def test_byte_level_pieces(byte_level: Tokenizer, text: str, pieces: list[str]) -> None:
    ids = byte_level.encode(text)
    assert spelled(byte_level, ids) == pieces
    assert byte_level.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("hello world", ["hello", " world"]),
        ("the  hello", ["the", "  ", "hello"]),
        ("the    hello", ["the", "   ", " hello"]),
        ("a\n\n\nb", ["a", "\n\n", "\n", "b"]),
        ("<b>hello", ["<b>", "hello"]),
        ("hello<end_of_turn>\n", ["hello", "<end_of_turn>", "\n"]),
        ("é", ["é"]),
        ("<0x41>", ["<", "0", "x", "4", "1", ">"]),
    ],
)
def test_sentencepiece_pieces(sentencepiece: Tokenizer, text: str, pieces: list[str]) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert spelled(sentencepiece, ids) == pieces
    assert sentencepiece.decode(ids, skip_special_tokens=False) == text


def test_byte_fallback_spells_unknown_characters(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello🌶", add_special_tokens=False)
    assert [sentencepiece.token_bytes[i] for i in ids[1:]] == [b"\xf0", b"\x9f", b"\x8c", b"\xb6"]
    assert sentencepiece.decode(ids) == "hello🌶"


def test_space_prefix_is_added_and_taken_away(space_prefixed: Tokenizer) -> None:
    ids = space_prefixed.encode("hello world")
    assert spelled(space_prefixed, ids) == ["<bos>", " hello", " world"]
    assert space_prefixed.decode(ids) == "hello world"
    behind = space_prefixed.encode("<start_of_turn>hello", add_special_tokens=False)
    assert spelled(space_prefixed, behind) == ["<start_of_turn>", " hello"]


def test_b46_bos_exactly_once(sentencepiece: Tokenizer, byte_level: Tokenizer) -> None:
    assert sentencepiece.encode("hello").count(2) == 1
    assert sentencepiece.encode("<bos>hello").count(2) == 1
    assert sentencepiece.encode("<bos>hello") == sentencepiece.encode("hello")
    assert sentencepiece.encode("") == [2]
    assert sentencepiece.encode("hello", add_special_tokens=False).count(2) == 0
    assert byte_level.encode("hello").count(1) == 0


def test_b22_ids_around_special_tokens_come_back(sentencepiece: Tokenizer) -> None:
    for text in ("<bos>G", "<bos> G", "a<end_of_turn> b", "<eos><eos>"):
        ids = sentencepiece.encode(text, add_special_tokens=False)
        again = sentencepiece.decode(ids, skip_special_tokens=False)
        assert again == text
        assert sentencepiece.encode(again, add_special_tokens=False) == ids


def test_special_tokens_can_be_plain_words(any_tokenizer: Tokenizer) -> None:
    name = "<|im_end|>" if any_tokenizer.special_token_id("<|im_end|>") else "<end_of_turn>"
    token_id = any_tokenizer.special_token_id(name)
    assert token_id is not None
    assert token_id in any_tokenizer.encode(f"a{name}b")
    ids = any_tokenizer.encode(f"a{name}b", False, parse_special=False)
    assert not set(ids) & any_tokenizer.special.ids
    assert any_tokenizer.decode(ids) == f"a{name}b"
    assert token_id in any_tokenizer.encode(f"a{name}b")  # the switch leaves nothing behind


def test_b49_nul_is_a_character_and_a_lone_surrogate_is_refused(any_tokenizer: Tokenizer) -> None:
    assert any_tokenizer.decode(any_tokenizer.encode("before\0after")) == "before\0after"
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 2"):
        any_tokenizer.encode("ab\ud83d")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_text_survives_encoding(any_tokenizer: Tokenizer, text: str) -> None:
    # A space mark in a text reads as a space: SentencePiece cannot tell them apart.
    text = text.replace("\u2581", "_")
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    expected = text
    if any_tokenizer.token_bytes.strip_leading_space:
        special = any_tokenizer.special.ids
        expected = text if not set(ids) & special else any_tokenizer.decode(ids, False)
    assert any_tokenizer.decode(ids, skip_special_tokens=False) == expected


def slow_merges(symbols: list[str], scores: dict[str, float]) -> list[str]:
    """The definition: merge the best-scored adjacent pair, the leftmost of equals, again."""
    while True:
        options = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in scores
        ]
        if not options:
            return symbols
        _, i = min(options)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]


@pytest.mark.parametrize("long_piece", [0, 10**9], ids=["heap", "scan"])
def test_both_merge_routines_follow_the_definition(
    long_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    texts = ["a", "b", "c", "ab", "bc", "abc", "aa", "aab", "cab", "ca", "abcab", "bb", "aaaa"]
    scores = {text: float(rng.randrange(6)) for text in texts}
    ids = {text: i for i, text in enumerate(texts)}
    costs = [-scores[text] for text in texts] + [float("inf")]
    encoder = sentencepiece_module.SentencePieceEncoder(
        ids, costs, None, 0, {}, {}, add_space_prefix=False
    )
    monkeypatch.setattr(sentencepiece_module, "_LONG_PIECE", long_piece)
    for _ in range(300):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 25)))
        expected = [ids[symbol] for symbol in slow_merges(list(text), scores)]
        assert encoder.encode(text, True) == expected, text


def test_text_is_not_cut_where_a_token_crosses() -> None:
    """A token with a space mark inside forbids encoding word by word."""
    tokens = ["<unk>", "a", "b", "▁", "a▁", "a▁b"]
    costs = [float("inf"), 9.0, 9.0, 9.0, 1.0, 2.0, float("inf")]
    encoder = sentencepiece_module.SentencePieceEncoder(
        {text: i for i, text in enumerate(tokens)}, costs, None, 0, {}, {}, add_space_prefix=False
    )
    assert encoder.encode("a b", True) == [5]


def test_added_tokens_are_found_leftmost_and_longest() -> None:
    matcher = AddedTokenMatcher({"<a>": 1, "<a><b>": 2, "x": 3, "xy": 4, "\n": 5, "\n\n": 6})
    assert matcher.split("p<a>q<a><b>") == ["p", 1, "q", 2]
    assert matcher.split("xxyz") == [3, 4, "z"]
    assert matcher.split("\n\n\n") == [6, 5]
    assert matcher.split("<a") == ["<a"]
    assert AddedTokenMatcher({"x": 1, "xyz": 2}).split("xyq") == [1, "yq"]
    assert matcher.split("") == []
    assert AddedTokenMatcher({}).split("abc") == ["abc"]


def test_ids_with_a_meaning(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert (byte_level.bos_token_id, byte_level.eos_token_id) == (1, 2)
    assert byte_level.extra_eos_token_ids == (0,)
    assert (sentencepiece.bos_token_id, sentencepiece.eos_token_id) == (2, 1)
    assert sentencepiece.extra_eos_token_ids == (5,)
    assert sentencepiece.is_special(5)
    assert not sentencepiece.is_special(10)  # <b> is user-defined, not control
    assert sentencepiece.special.by_name["bos_token"] == "<bos>"
    assert byte_level.special_token_id("<|im_end|>") == 2
    assert byte_level.special_token_id("hello") is None


def test_eot_key_is_an_end_of_turn(make_byte_level: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(make_byte_level(eos_token_id=0, eot_token_id=1))
    assert tokenizer.eos_token_id == 0
    assert tokenizer.extra_eos_token_ids == (1, 2)


def test_unknown_ids_decode_to_nothing(any_tokenizer: Tokenizer) -> None:
    assert any_tokenizer.decode([-1, any_tokenizer.vocab_size, 10**9]) == ""


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a123", ["a", "1", "2", "3"]),
        ("gpt-2", "DON'T", ["D", "O", "N", "'", "T"]),
        ("qwen2", "x\n\n y", ["x", "\n", "\n", " ", "y"]),
        ("llama-bpe", "the hello", ["the", " hello"]),
        ("tekken", "the hello", ["the", " hello"]),
    ],
)
def test_known_pre_tokenizers(
    make_byte_level: Make, pre: str, text: str, pieces: list[str]
) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(make_byte_level(pre))
    assert spelled(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == pieces


def words_of(pre: str, text: str) -> list[str]:
    """Where a pre-tokeniser cuts."""
    from twostep.frontend.pre_tokenizers import build_pre_tokenizer, kind_of

    cut = build_pre_tokenizer(kind_of(pre)).pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in cut]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'll be 2024!", ["I", "'ll", " be", " 2024", "!"]),
        ("smollm", "in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("llama-bpe", "in 20245 WE'LL", ["in", " ", "202", "45", " WE", "'LL"]),
        ("qwen2", "in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("qwen2", "a:b\n\n  c", ["a", ":b", "\n\n", " ", " c"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
    ],
)
def test_where_pre_tokenizers_cut(pre: str, text: str, words: list[str]) -> None:
    assert words_of(pre, text) == words


def test_qwen_composes_characters_and_others_do_not(make_byte_level: Make) -> None:
    decomposed = "e\u0301"
    qwen = Tokenizer.from_gguf_metadata(make_byte_level("qwen2"))
    other = Tokenizer.from_gguf_metadata(make_byte_level("smollm"))
    assert qwen.decode(qwen.encode(decomposed)) == "é"
    assert other.decode(other.encode(decomposed)) == decomposed


def test_bos_default_depends_on_the_family(make_byte_level: Make) -> None:
    for pre, adds in (("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)):
        tokenizer = Tokenizer.from_gguf_metadata(make_byte_level(pre, add_bos_token=None))
        assert tokenizer.encode("hello")[0] == (1 if adds else tokenizer.encode("hello", False)[0])


def test_eos_is_added_when_the_file_says_so(make_byte_level: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(make_byte_level(add_eos_token=True))
    assert tokenizer.encode("hello")[-1] == 2
    assert tokenizer.encode("hello<|im_end|>").count(2) == 1


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": None}, ModelFileError, "tokenizer.ggml.model is missing"),
        ({"model": "rwkv"}, UnsupportedModelError, "'rwkv'"),
        ({"tokens": None}, ModelFileError, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, ModelFileError, "tokenizer.ggml.tokens is missing or empty"),
        ({"merges": None}, ModelFileError, "tokenizer.ggml.merges is missing"),
        ({"merges": ["q zzz"]}, ModelFileError, "tokenizer.ggml.merges does not fit"),
        ({"token_type": [1, 2]}, ModelFileError, "token_type has 2 entries"),
        ({"token_type": ["x"]}, ModelFileError, "no token type"),
        ({"eos_token_id": 10**6}, ModelFileError, "eos_token_id = 1000000 is outside"),
    ],
)
def test_bad_byte_level_metadata(
    make_byte_level: Make, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        Tokenizer.from_gguf_metadata(make_byte_level(**changes))


def test_unknown_pre_tokenizer_is_named(make_byte_level: Make) -> None:
    with pytest.raises(UnsupportedModelError, match="'kimi-k9'"):
        Tokenizer.from_gguf_metadata(make_byte_level("kimi-k9"))


def test_missing_ids_are_none(make_byte_level: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(
        make_byte_level(bos_token_id=None, eos_token_id=0xFFFFFFFF, add_bos_token=True)
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.encode("hello") == tokenizer.encode("hello", add_special_tokens=False)


def test_bad_sentencepiece_metadata(make_sentencepiece: Make) -> None:
    with pytest.raises(ModelFileError, match="scores has 1 entries"):
        Tokenizer.from_gguf_metadata(make_sentencepiece(scores=[0.0]))
    metadata = make_sentencepiece()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("<0x41>")] = "<0x42>"
    with pytest.raises(ModelFileError, match="lacks the byte token"):
        Tokenizer.from_gguf_metadata(metadata)


def test_merges_never_make_a_control_token(make_sentencepiece: Make) -> None:
    metadata = make_sentencepiece()
    metadata["tokenizer.ggml.tokens"].append("qz")
    metadata["tokenizer.ggml.token_type"].append(3)
    metadata["tokenizer.ggml.scores"].append(0.0)
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert len(tokenizer.encode("qz", False)) == 1
    assert spelled(tokenizer, tokenizer.encode("qz", False, parse_special=False)) == ["q", "z"]


def test_metadata_is_not_changed(make_sentencepiece: Make) -> None:
    metadata = make_sentencepiece()
    before = list(metadata["tokenizer.ggml.tokens"])
    Tokenizer.from_gguf_metadata(metadata)
    assert metadata["tokenizer.ggml.tokens"] == before


def test_without_byte_tokens_the_unknown_token_is_used(make_sentencepiece: Make) -> None:
    metadata = make_sentencepiece()
    kinds = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = [5 if kind == 6 else kind for kind in kinds]
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.encode("🌶", add_special_tokens=False) == [3]


def test_long_text_without_spaces_is_encoded_alike(sentencepiece: Tokenizer) -> None:
    text = "helloworldstop" * 200
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert sentencepiece.decode(ids) == text
    assert spelled(sentencepiece, ids)[:3] == ["hello", "world", "stop"]
