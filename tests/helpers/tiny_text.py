"""The tokenizer of the tiny checkpoints: byte-level BPE of 256 bytes, a dozen merges, specials."""

from __future__ import annotations

import json
from typing import Any

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
BOS, EOS = "<|im_start|>", "<|im_end|>"
MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("Ġ", "t"),
    ("Ġ", "a"),
    ("i", "n"),
    ("r", "e"),
    ("o", "n"),
    ("Ġt", "he"),
    ("e", "r"),
    ("Ġ", "s"),
    ("he", "ll"),
    ("Ġ", "w"),
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in GPT-2's byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def vocabulary() -> list[str]:
    """All tokens in order of their ids: specials, bytes, merged pairs."""
    return [*SPECIALS, *byte_alphabet(), *(left + right for left, right in MERGES)]


VOCAB_SIZE = len(SPECIALS) + 256 + len(MERGES)


def tokenizer_json() -> str:
    """Contents of ``tokenizer.json``."""
    tokens = vocabulary()
    added = [
        {
            "id": tokens.index(text),
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text in SPECIALS
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [digits, {**byte_level, "use_regex": True}],
            },
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {text: i for i, text in enumerate(tokens)},
                "merges": [f"{left} {right}" for left, right in MERGES],
            },
        }
    )


def tokenizer_config() -> dict[str, Any]:
    """Contents of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def gguf_tokenizer(vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """The same tokenizer as GGUF metadata, with further tokens that no text has."""
    tokens = [*vocabulary(), *(f"filler{i}" for i in range(VOCAB_SIZE, vocab_size))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if text in SPECIALS else 1 for text in tokens],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in MERGES],
        "tokenizer.ggml.bos_token_id": tokens.index(BOS),
        "tokenizer.ggml.eos_token_id": tokens.index(EOS),
        "tokenizer.ggml.padding_token_id": tokens.index("<|pad|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
