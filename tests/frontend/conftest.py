"""Two small tokenizers, one of each kind, made as a GGUF file would describe them."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import pytest

from twostep.frontend.input_processor import InputProcessor
from twostep.frontend.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = ["the", "hello", "world", "stop", "and", "was", "日本", "don"]


def byte_alphabet() -> list[str]:
    """The character that spells each byte in byte-level BPE, written out independently."""
    plain = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    chars, extra = [], 256
    for byte in range(256):
        if byte in plain:
            chars.append(chr(byte))
        else:
            chars.append(chr(extra))
            extra += 1
    return chars


def byte_level_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """A vocabulary of all bytes, merges that spell WORDS with and without a space, specials."""
    alphabet = byte_alphabet()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet]
    merges: list[str] = []
    space = alphabet[0x20]
    for word in WORDS:
        symbols = [alphabet[byte] for byte in word.encode()]
        left = symbols[0]
        for right in symbols[1:]:
            if f"{left} {right}" not in merges:
                merges.append(f"{left} {right}")
                tokens.append(left + right)
            left += right
        merges.append(f"{space} {left}")
        tokens.append(space + left)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A scored vocabulary with byte fallback, user-defined white space and turn markers."""
    entries: list[tuple[str, int, float]] = [
        ("<pad>", CONTROL, 0.0),
        ("<eos>", CONTROL, 0.0),
        ("<bos>", CONTROL, 0.0),
        ("<unk>", UNKNOWN, 0.0),
        ("<start_of_turn>", CONTROL, 0.0),
        ("<end_of_turn>", CONTROL, 0.0),
        ("\n", USER_DEFINED, 0.0),
        ("\n\n", USER_DEFINED, 0.0),
        ("▁▁", USER_DEFINED, 0.0),
        ("▁▁▁", USER_DEFINED, 0.0),
        ("<b>", USER_DEFINED, 0.0),
    ]
    entries += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    score = 0.0
    seen = {text for text, _, _ in entries}
    for word in WORDS:
        for text in (word, "▁" + word):
            for end in range(2, len(text) + 1):
                if text[:end] not in seen:
                    seen.add(text[:end])
                    score -= 1.0
                    entries.append((text[:end], NORMAL, score))
    for char in "▁" + string.ascii_letters + string.punctuation + "é日":
        score -= 1.0
        entries.append((char, NORMAL, score))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in entries],
        "tokenizer.ggml.token_type": [kind for _, kind, _ in entries],
        "tokenizer.ggml.scores": [score for _, _, score in entries],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Byte-level BPE; adds no BOS."""
    return Tokenizer.from_gguf_metadata(byte_level_metadata())


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """SentencePiece type without space prefix, as Gemma's; adds BOS."""
    return Tokenizer.from_gguf_metadata(sentencepiece_metadata())


@pytest.fixture(scope="session")
def space_prefixed() -> Tokenizer:
    """SentencePiece type that puts a space before a text, as Llama 2's."""
    return Tokenizer.from_gguf_metadata(sentencepiece_metadata(add_space_prefix=True))


@pytest.fixture(params=["byte_level", "sentencepiece", "space_prefixed"], scope="session")
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the three."""
    tokenizer = request.getfixturevalue(request.param)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def make_byte_level() -> Callable[..., dict[str, Any]]:
    """Metadata of the byte-level tokenizer, changed at will."""
    return byte_level_metadata


@pytest.fixture(scope="session")
def make_sentencepiece() -> Callable[..., dict[str, Any]]:
    """Metadata of the SentencePiece tokenizer, changed at will."""
    return sentencepiece_metadata


@pytest.fixture
def make_inputs(byte_level: Tokenizer) -> Callable[..., InputProcessor]:
    """An input processor whose seeds and ids count up."""

    def make(tokenizer: Tokenizer | None = byte_level, **options: Any) -> InputProcessor:
        counter = iter(range(1000))
        options.setdefault("max_model_len", 64)
        options.setdefault("vocab_size", 4096 if tokenizer else 100)
        return InputProcessor(
            tokenizer,
            seed_source=lambda: 1000 + next(counter),
            id_source=lambda: "abc",
            clock=lambda: 12.5,
            **options,
        )

    return make
