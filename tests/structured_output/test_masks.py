"""Masks against the slow oracle: a token is allowed if, and only if, the grammar accepts it."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structured_output.conftest import (
    EOS,
    EOT,
    FIRST_BYTE,
    SIZE,
    TOKENS,
    TOOL,
    Kit,
    allowed_ids,
    ids_of,
    text_of,
)
from structured_output.schemas import SCHEMAS

GRAMMARS: dict[str, dict[str, object]] = {
    "schema": {"json": SCHEMAS["form: enum"]},
    "numbers": {"json": SCHEMAS["list: number"]},
    "any object": {"json_object": True},
    "regex": {"regex": "(ab|a+b)(foo|bar)*"},
    "characters": {"regex": "[\u00e4-\u20ac]{2}"},
    "choice": {"choice": ("a", "ab", "foo bar", "gr\u00fcn")},
    "lark": {"grammar": 'start: "(" start ")" | /a+/'},
    "gbnf": {"grammar": 'root ::= "a" root "b" | "foo"'},
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_exact(kit: Kit, name: str) -> None:
    for seed in range(2):
        grammar = kit.grammar(**GRAMMARS[name])
        rng = random.Random(seed)
        for _ in range(12):
            if grammar.is_terminated():
                break
            allowed = allowed_ids(grammar.fill_bitmask())
            assert allowed == [i for i in range(SIZE) if grammar.validate_tokens([i]) == [i]]
            text = [i for i in allowed if i not in (EOS, EOT)]
            if not text:
                break
            assert grammar.accept_tokens([rng.choice(text)])


@pytest.mark.parametrize("name", GRAMMARS)
def test_rollback_leaves_no_trace(kit: Kit, name: str) -> None:
    tokens = kit.walk(kit.grammar(**GRAMMARS[name]), seed=3)
    grammar, fresh = kit.grammar(**GRAMMARS[name]), kit.grammar(**GRAMMARS[name])
    masks = []
    for token in tokens:
        masks.append(fresh.fill_bitmask())
        assert fresh.accept_tokens([token])
    rng = random.Random(0)
    at = 0
    for _ in range(40):
        step = rng.randint(-at, len(tokens) - at)
        if step < 0:
            grammar.rollback(-step)
        else:
            assert grammar.accept_tokens(tokens[at : at + step])
        at += step
        if at < len(tokens):
            assert grammar.fill_bitmask() == masks[at]
        # A token that is not allowed changes nothing.
        assert not grammar.accept_tokens([TOOL])


def test_validate_tokens_is_the_longest_prefix_and_changes_nothing(kit: Kit) -> None:
    grammar = kit.grammar(regex="a{2,4}")
    a, b = ids_of("ab")
    before = grammar.fill_bitmask()
    assert grammar.validate_tokens([]) == []
    assert grammar.validate_tokens([a, a, b]) == [a, a]
    assert grammar.validate_tokens([a, EOS]) == [a]
    assert grammar.validate_tokens([a, a, EOS, a]) == [a, a, EOS]
    assert grammar.validate_tokens([a, a, a, a, a]) == [a, a, a, a]
    assert grammar.fill_bitmask() == before


# -- ends ------------------------------------------------------------------------------------------


def test_ends_are_allowed_where_the_grammar_may_end_and_nowhere_else(kit: Kit) -> None:
    grammar = kit.grammar(regex="a{2,3}")
    [a] = ids_of("a")
    seen = []
    for _ in range(3):
        seen.append({EOS, EOT} <= set(allowed_ids(grammar.fill_bitmask())))
        assert not grammar.is_terminated()
        assert grammar.accept_tokens([a])
    assert seen == [False, False, True]
    assert grammar.is_terminated()
    assert allowed_ids(grammar.fill_bitmask()) == [EOS, EOT]


def test_an_end_is_an_end_and_can_be_taken_back(kit: Kit) -> None:
    grammar = kit.grammar(regex="a+")
    [a] = ids_of("a")
    assert not grammar.accept_tokens([EOS])
    assert grammar.accept_tokens([a, EOT])
    assert grammar.is_terminated()
    assert not grammar.accept_tokens([a])
    assert not grammar.accept_tokens([EOS])
    grammar.rollback(1)
    assert not grammar.is_terminated()
    assert grammar.accept_tokens([a])
    grammar.rollback(2)
    assert not grammar.accept_tokens([EOS])


def test_a_stop_token_of_the_request_is_no_part_of_the_text(kit: Kit) -> None:
    """ "b" ends this request: the grammar may not use it, but may end with it."""
    a, b = ids_of("ab")
    grammar = kit.grammar(ends=[EOS, b], regex="a+b?")
    assert b not in allowed_ids(grammar.fill_bitmask())
    assert grammar.accept_tokens([a])
    assert {b, EOS} <= set(allowed_ids(grammar.fill_bitmask()))
    assert EOT not in allowed_ids(grammar.fill_bitmask())
    assert grammar.accept_tokens([b])
    assert grammar.is_terminated()


def test_who_ignores_ends_goes_on_while_there_is_something_to_say(kit: Kit) -> None:
    grammar = kit.grammar(ends=[], regex="a{1,3}")
    [a] = ids_of("a")
    for _ in range(3):
        allowed = allowed_ids(grammar.fill_bitmask())
        assert a in allowed
        assert not {EOS, EOT} & set(allowed)
        assert grammar.accept_tokens([a])
    assert grammar.is_terminated()
    assert allowed_ids(grammar.fill_bitmask()) == [EOS, EOT]


def test_special_tokens_need_a_grammar_that_asks_for_them(kit: Kit) -> None:
    assert TOOL not in allowed_ids(kit.grammar(regex="(?s:.*)").fill_bitmask())
    spelled = kit.grammar(regex="<tool>x")
    assert TOOL not in allowed_ids(spelled.fill_bitmask())
    assert spelled.accept_tokens(ids_of("<tool>x"))
    asked = kit.grammar(grammar='start: <tool> "x"')
    assert allowed_ids(asked.fill_bitmask()) == [TOOL]
    assert asked.accept_tokens([TOOL, *ids_of("x")])
    assert asked.is_terminated()


def test_tokens_with_the_same_bytes_are_allowed_together(kit: Kit) -> None:
    allowed = allowed_ids(kit.grammar(regex=r"\n|ab").fill_bitmask())
    assert sorted(TOKENS[i] for i in allowed) == [b"\n", b"\n", b"a", b"ab"]


def test_bytes_that_are_no_text_are_never_allowed(kit: Kit) -> None:
    allowed = allowed_ids(kit.grammar(regex="(?s:.*)").fill_bitmask())
    assert FIRST_BYTE + 0xC3 in allowed  # the beginning of a character
    assert FIRST_BYTE + 0xFF not in allowed
    assert FIRST_BYTE + 0x80 not in allowed
    assert not [i for i in allowed if i not in (EOS, EOT) and (i >= len(TOKENS) or not TOKENS[i])]


# -- regexes and choices ---------------------------------------------------------------------------

ATOMS = st.sampled_from(
    ["a", "b", "ab", "foo", "[a-c]", "[x-z]", "[0-9]", r"\.", "\u00fc", "[\u00e4-\u20ac]", "- "]
)
"""No ``\\w`` or ``\\d``: which characters they are depends on whose Unicode tables are asked."""


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"]))
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        repeated.map(lambda two: f"(?:{two[0]}){two[1]}"),
    )


@settings(max_examples=25, deadline=None)
@given(pattern=st.recursive(ATOMS, compound, max_leaves=6), seed=st.integers(0, 9))
def test_texts_of_a_regex_match_it(kit: Kit, pattern: str, seed: int) -> None:
    text = text_of(kit.walk(kit.grammar(regex=pattern), seed, patience=15)).decode()
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    "pattern", ["^(|.*)$", "^foo$", r"[\x00-\u2e7f]+", "(?i)aB", "a/b", r'"\\"']
)
def test_regexes_that_broke_others(kit: Kit, pattern: str) -> None:
    for seed in range(4):
        text = text_of(kit.walk(kit.grammar(regex=pattern), seed, patience=15)).decode()
        assert re.fullmatch(pattern, text)


@settings(max_examples=25, deadline=None)
@given(
    choice=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 9),
)
def test_a_choice_is_one_of_its_texts_and_can_be_each(
    kit: Kit, choice: list[str], seed: int
) -> None:
    chosen = text_of(kit.walk(kit.grammar(choice=tuple(choice)), seed)).decode()
    assert chosen in choice
    for text in choice:
        grammar = kit.grammar(choice=tuple(choice))
        assert grammar.accept_tokens(ids_of(text))
        assert EOS in allowed_ids(grammar.fill_bitmask())
