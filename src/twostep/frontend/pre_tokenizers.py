"""How byte-level BPE vocabularies cut text into words before merging, by GGUF name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostep.contracts.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _letters_and_digits(digits: str) -> str:
    return rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


_CASED_WORDS = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)

_REGEX = {
    "llama3": _letters_and_digits(r"\p{N}{1,3}"),
    "qwen2": _letters_and_digits(r"\p{N}"),
    "tekken": _CASED_WORDS,
}

_KIND = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "starcoder": "smollm",
    "llama-bpe": "llama3",
    "llama-v3": "llama3",
    "llama3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "tekken": "tekken",
}

_WHOLE_WORDS_FIRST = frozenset({"llama3", "tekken"})


def kind_of(name: str) -> str:
    """The rule behind a value of ``tokenizer.ggml.pre``; UnsupportedModelError if unknown."""
    kind = _KIND.get(name)
    if kind is None:
        known = ", ".join(sorted(_KIND))
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre = {name!r} is a pre-tokeniser this version does not know "
            f"(known: {known}); use a model directory with tokenizer.json instead"
        )
    return kind


def adds_bos(kind: str) -> bool:
    """Whether these vocabularies put BOS first when the file does not say."""
    return kind in _WHOLE_WORDS_FIRST


def takes_whole_words(kind: str) -> bool:
    """Whether a word that is a token is taken as it is, without going through the merges."""
    return kind in _WHOLE_WORDS_FIRST


def build_pre_tokenizer(kind: str) -> PreTokenizer:
    """The rule as the ``tokenizers`` library runs it."""
    from tokenizers import Regex, pre_tokenizers

    if kind == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        first: PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence(
            [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    first = pre_tokenizers.Split(Regex(_REGEX[kind]), behavior="isolated")
    return pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def build_normalizer(kind: str) -> Normalizer | None:
    """What happens to text before it is cut: Qwen composes characters (NFC), others nothing."""
    from tokenizers import normalizers

    return normalizers.NFC() if kind == "qwen2" else None
