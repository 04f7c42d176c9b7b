"""A small vocabulary with every byte in it, and a compiler for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from twostep.config.limits import Limits
from twostep.contracts.sampling import StructuredOutputsParams
from twostep.structured_output.compiler import LLGuidanceCompiler
from twostep.structured_output.grammar import LLGuidanceGrammar
from twostep.structured_output.tokenizer import Vocabulary

EOS, EOT, TOOL = 0, 1, 2
SPECIALS = [b"<|eos|>", b"<|eot|>", b"<tool>"]
PIECES = [
    *[
        b'{"',
        b'":',
        b'",',
        b'": "',
        b'"}',
        b'["',
        b'"]',
        b"},",
        b"]}",
        b"}}",
        b"[]",
        b"{}",
        b"\n  ",
    ],
    *[
        b"true",
        b"fal",
        b"se",
        b"null",
        b"id",
        b'"id"',
        b"val",
        b"ue",
        b"kind",
        b"name",
        b" a",
        b"the",
    ],
    *[
        b"10",
        b"12",
        b"0.",
        b"2024-",
        b"-0",
        b"@",
        b"red",
        b'"red',
        b"gr\xc3\xbc",
        b"\xc3",
        b"\xbcn",
    ],
    *[
        b"ab",
        b"aab",
        b"foo",
        b"bar",
        b" ",
        b"  ",
        b"    ",
        b"\n",
        b"\xe2\x82",
        b"\xe2\x82\xac",
        b"",
    ],
]
TOKENS = [*SPECIALS, *(bytes([i]) for i in range(256)), *PIECES]
FIRST_BYTE = len(SPECIALS)
SIZE = len(TOKENS) + 5
"""The model has padding behind its tokens."""

VOCABULARY = Vocabulary(TOKENS, frozenset([EOS, EOT, TOOL]), (EOS, EOT), SIZE)


class Kit:
    """A compiler, and what tests do with grammars."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.compiler = LLGuidanceCompiler(lambda: VOCABULARY, limits)

    def grammar(self, ends: Sequence[int] = (EOS, EOT), **params: object) -> LLGuidanceGrammar:
        wanted = StructuredOutputsParams(**params)  # type: ignore[arg-type]
        return self.compiler.compile(wanted, frozenset(ends)).result()

    def walk(self, grammar: LLGuidanceGrammar, seed: int, patience: int = 60) -> list[int]:
        """A random text of the grammar, as tokens without the end. It is not dragged out: after
        ``patience`` tokens closing ones are preferred."""
        rng = random.Random(seed)
        tokens: list[int] = []
        while not grammar.is_terminated():
            allowed = allowed_ids(grammar.fill_bitmask())
            assert allowed, f"stuck behind {text_of(tokens)!r}"
            if {EOS, EOT} & set(allowed) and (rng.random() < 0.3 or len(tokens) > patience):
                break
            choice = rng.choice(_closing(allowed) if len(tokens) > patience else allowed)
            assert len(tokens) < 4000, f"no end in sight: {text_of(tokens)[-80:]!r}"
            assert grammar.accept_tokens([choice]), (text_of(tokens), TOKENS[choice])
            if choice not in (EOS, EOT):
                tokens.append(choice)
        return tokens


def _closing(allowed: list[int]) -> list[int]:
    """Those of the allowed tokens that lead to an end."""
    for tier in (b'"}]', b",:", b"10e"):
        found = [i for i in allowed if i - FIRST_BYTE in set(tier)]
        if found:
            return found
    return allowed


def allowed_ids(mask: bytes) -> list[int]:
    assert len(mask) == 4 * -(-SIZE // 32)
    bits = int.from_bytes(mask, "little")
    assert bits >> SIZE == 0, "bits behind the vocabulary"
    return [i for i in range(SIZE) if bits >> i & 1]


def text_of(tokens: Sequence[int]) -> bytes:
    return b"".join(TOKENS[i] for i in tokens)


def ids_of(text: str) -> list[int]:
    """One token for each byte."""
    return [FIRST_BYTE + byte for byte in text.encode()]


@pytest.fixture(scope="session")
def kit() -> Iterator[Kit]:
    kit = Kit()
    yield kit
    kit.compiler.close()


@pytest.fixture(scope="session")
def make_kit() -> Callable[..., Kit]:
    return Kit
