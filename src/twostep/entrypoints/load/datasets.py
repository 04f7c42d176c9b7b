"""What the requests of a load test ask: prompts and lengths of answers."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec

from twostep.contracts.errors import UsageError
from twostep.frontend.tokenizer import Tokenizer

_WORD = re.compile(r" [a-z]{2,}")
SHAREGPT_MIN_TOKENS = 4
"""Shorter prompts or answers of a ShareGPT file are left out, as others do."""
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048


class Prompt(msgspec.Struct, frozen=True):
    """One request."""

    text: str
    num_tokens: int
    """Length of ``text``, by the tokenizer of the test."""
    output_len: int
    """Tokens asked for."""


def random_prompts(
    tokenizer: Tokenizer,
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[Prompt]:
    """Prompts of random words, one token each, so that their lengths are exact.

    Lengths are uniform in ``[len * (1 - range_ratio), len * (1 + range_ratio)]``. The first
    ``prefix_len`` tokens are the same for all, and come on top of ``input_len``.
    """
    if not 0 <= range_ratio < 1:
        raise UsageError("--random-range-ratio must be at least 0 and below 1")
    source = random.Random(seed)
    words = _one_token_words(tokenizer)
    prefix = source.choices(words, k=prefix_len)
    prompts = []
    for _ in range(count):
        length = _draw(source, input_len, range_ratio)
        text = "".join([*prefix, *source.choices(words, k=length)])
        prompts.append(Prompt(text, prefix_len + length, _draw(source, output_len, range_ratio)))
    return prompts


def prefix_repetition_prompts(
    tokenizer: Tokenizer,
    count: int,
    *,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    seed: int = 0,
) -> list[Prompt]:
    """Random words again: ``num_prefixes`` beginnings, each shared by as many prompts, shuffled."""
    if num_prefixes > count:
        raise UsageError(f"--prefix-repetition-num-prefixes {num_prefixes}: only {count} prompts")
    source = random.Random(seed)
    words = _one_token_words(tokenizer)
    prefixes = ["".join(source.choices(words, k=prefix_len)) for _ in range(num_prefixes)]
    texts = [
        prefixes[index % num_prefixes] + "".join(source.choices(words, k=suffix_len))
        for index in range(count)
    ]
    source.shuffle(texts)
    return [Prompt(text, prefix_len + suffix_len, output_len) for text in texts]


def sharegpt_prompts(
    tokenizer: Tokenizer, file: Path, count: int, *, output_len: int | None = None, seed: int = 0
) -> list[Prompt]:
    """First question and answer of conversations in a ShareGPT file, shuffled.

    Very short and very long ones are left out. ``output_len`` replaces the answers' lengths.
    """
    conversations = [
        entry["conversations"]
        for entry in _read_json(file)
        if isinstance(entry, dict) and len(entry.get("conversations", ())) >= 2
    ]
    random.Random(seed).shuffle(conversations)
    prompts: list[Prompt] = []
    for question, answer, *_ in conversations:
        if len(prompts) == count:
            break
        num_prompt = len(tokenizer.encode(question["value"]))
        num_answer = output_len or len(tokenizer.encode(answer["value"]))
        if (
            min(num_prompt, num_answer) >= SHAREGPT_MIN_TOKENS
            and num_prompt <= SHAREGPT_MAX_PROMPT
            and num_prompt + num_answer <= SHAREGPT_MAX_TOTAL
        ):
            prompts.append(Prompt(question["value"], num_prompt, num_answer))
    return _repeat(prompts, count, file)


def custom_prompts(
    tokenizer: Tokenizer, file: Path, count: int, *, output_len: int
) -> list[Prompt]:
    """A JSON-lines file of ``{"prompt": ..., "output_tokens": ...}``; the second is optional."""
    prompts = []
    for number, line in enumerate(_read(file).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["prompt"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f'{file}, line {number}: not {{"prompt": "..."}}') from None
        length = entry.get("output_tokens") or output_len
        prompts.append(Prompt(text, len(tokenizer.encode(text)), int(length)))
    return _repeat(prompts[:count], count, file)


def _repeat(prompts: list[Prompt], count: int, file: Path) -> list[Prompt]:
    """``count`` prompts; those of a short file come again."""
    if not prompts:
        raise UsageError(f"{file} has no usable prompt")
    return [prompts[index % len(prompts)] for index in range(count)]


def _draw(source: random.Random, length: int, ratio: float) -> int:
    return max(1, source.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def _one_token_words(tokenizer: Tokenizer) -> list[str]:
    """Words that are one token each, wherever they stand."""
    words = []
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([token_id])
        if _WORD.fullmatch(text) and tokenizer.encode(text, add_special_tokens=False) == [token_id]:
            words.append(text)
        if len(words) == 4096:
            break
    if len(words) < 2:
        raise UsageError("this tokenizer has no words of one token: use another --dataset-name")
    return words


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read --dataset-path {file}: {reason}") from error


def _read_json(file: Path) -> list[Any]:
    try:
        entries = json.loads(_read(file))
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise UsageError(f"{file} is not a list of conversations")
    return entries
