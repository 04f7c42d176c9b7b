"""A model without numbers: the KV of a position is a hash of all tokens up to it.

The next token is a function of that value, so that the text depends on every token that is read
back. Wrong KV therefore shows in the text, at once and without tolerances.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

VOCAB = 61
_MASK = (1 << 61) - 1


def first_value(salt: int) -> int:
    """What stands before position 0. ``salt`` keeps the KV of tenants apart."""
    return 0x1234_5678_9ABC_DEF + 0x9E37_79B9_7F4A_7C1 * salt & _MASK


def chain(previous: int, token: int) -> int:
    """KV of a position, from the KV before it and its token; ``chain_all`` has the same formula."""
    return (previous ^ (token + 1) * 0x1_0000_01B3) * 0x5851_F42D_4C95_7F2D + token & _MASK


def chain_all(value: int, tokens: Iterable[int]) -> list[int]:
    """KV of each of these tokens in turn: ``chain``, without a call for each."""
    values = []
    for token in tokens:
        value = (value ^ (token + 1) * 0x1_0000_01B3) * 0x5851_F42D_4C95_7F2D + token & _MASK
        values.append(value)
    return values


def pick(value: int) -> int:
    """The next token, from the KV of the newest position."""
    return (value >> 24) % VOCAB


def pick_allowed(value: int, mask: bytes) -> int:
    """The next token under a mask: bit t & 31 of word t >> 5 (little-endian) = t is allowed."""
    token = pick(value)
    for _ in range(VOCAB):
        if mask[token >> 3] >> (token & 7) & 1:
            return token
        token = (token + 1) % VOCAB
    return token


def drafter_is_right(value: int) -> bool:
    """Whether the drafter guesses the token that follows this KV: three times in four."""
    return value >> 40 & 3 != 0


def end_of_chain(salt: int, tokens: Sequence[int]) -> int:
    """KV of the last of these tokens."""
    value = first_value(salt)
    return chain_all(value, tokens)[-1] if tokens else value


def oracle(
    prompt: Sequence[int], max_tokens: int, stop_ids: Collection[int], salt: int = 0
) -> list[int]:
    """The answer to a request that runs alone, without cache, chunks or blocks."""
    value = end_of_chain(salt, prompt)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(pick(value))
        if tokens[-1] in stop_ids:
            break
        value = chain(value, tokens[-1])
    return tokens
