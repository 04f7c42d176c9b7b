"""Known answers published with Random123 (kat_vectors, philox4x32 10)."""

from __future__ import annotations

import pytest

from twostep.sampler.philox import philox4x32, uniform_bits

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_bits_takes_the_first_two_words():
    assert uniform_bits(0, 0) == 0xE169C58D_6627E8D5


def test_both_halves_of_the_seed_and_the_position_count():
    draws = {uniform_bits(seed, pos) for seed in (0, 1, 1 << 32, 1 << 63) for pos in range(50)}
    assert len(draws) == 200
