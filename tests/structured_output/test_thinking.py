"""A bound on reasoning: counted in tokens between tags, then the tag that ends it is forced."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from structured_output.conftest import FIRST_BYTE, SIZE, TOKENS, VOCABULARY

from twostep.contracts.sampling import StructuredOutputsParams, ThinkingBudget
from twostep.structured_output.compiler import LLGuidanceCompiler
from twostep.structured_output.thinking import ThinkingGrammar

START, END = "<t>", "</t>"


def spell(text: str) -> list[int]:
    """A text byte by byte."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def text_of(ids: Sequence[int]) -> str:
    return b"".join(TOKENS[i] for i in ids).decode("utf-8", "replace")


def budget(most: int, *, is_thinking: bool = True) -> ThinkingBudget:
    return ThinkingBudget(
        max_tokens=most,
        start=START,
        end=END,
        end_token_ids=tuple(spell(END)),
        is_thinking=is_thinking,
    )


def free(most: int, *, is_thinking: bool = True) -> ThinkingGrammar:
    return ThinkingGrammar(None, budget(most, is_thinking=is_thinking), VOCABULARY)


def allowed(grammar: ThinkingGrammar) -> set[int]:
    mask = int.from_bytes(grammar.fill_bitmask(), "little")
    assert mask < 1 << SIZE
    return {i for i in range(SIZE) if mask >> i & 1}


EVERYTHING = set(range(SIZE))


@pytest.mark.parametrize("most", [0, 1, 5])
def test_the_tag_is_forced_when_the_budget_is_used_up(most: int) -> None:
    grammar = free(most)
    for _ in range(most):
        assert allowed(grammar) == EVERYTHING
        assert grammar.accept_tokens(spell("x"))
    for token in spell(END):
        assert allowed(grammar) == {token}
        assert not grammar.accept_tokens(spell("x"))
        assert grammar.accept_tokens([token])
    for token in spell("an answer that is longer than the budget"):
        assert allowed(grammar) == EVERYTHING
        assert grammar.accept_tokens([token])
    assert not grammar.is_terminated()


def test_who_ends_in_time_is_left_alone() -> None:
    grammar = free(12)
    for token in spell(f"short{END}" + "y" * 50):
        assert allowed(grammar) == EVERYTHING
        assert grammar.accept_tokens([token])


def test_thinking_begins_with_its_tag_and_may_begin_again() -> None:
    """The budget is for all of it together."""
    grammar = free(6, is_thinking=False)
    assert grammar.accept_tokens(spell(f"a long beginning {START}12"))
    assert allowed(grammar) == EVERYTHING
    assert grammar.accept_tokens(spell(f"{END[:-1]}"))  # two and three: one is left
    assert grammar.accept_tokens(spell(END[-1]))
    assert grammar.accept_tokens(spell(f" between {START}"))
    assert allowed(grammar) == {spell(END)[0]}
    assert grammar.accept_tokens(spell(END))
    assert allowed(grammar) == EVERYTHING


def test_a_tag_in_one_token_or_over_the_edge_of_two() -> None:
    table = [*TOKENS, b"so</", b"t>well", b"</t>", b"<t>a</t>b<t>c"]
    vocabulary = type(VOCABULARY)(table, frozenset(), (), len(table))
    so, well, end, several = range(len(TOKENS), len(table))
    grammar = ThinkingGrammar(None, budget(3), vocabulary)
    assert grammar.accept_tokens([so, well])
    assert grammar.accept_tokens(spell("x" * 9))
    grammar = ThinkingGrammar(None, budget(1), vocabulary)
    assert grammar.accept_tokens([end])
    assert grammar.accept_tokens(spell("x" * 9))
    grammar = ThinkingGrammar(None, budget(0, is_thinking=False), vocabulary)
    assert grammar.accept_tokens([several])
    assert not grammar.accept_tokens(spell("x"))


@pytest.mark.parametrize("seed", range(30))
def test_going_back_is_as_if_it_had_not_been(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [START, END, "x", "<", "/t", ">", "é"]
    grammar = free(rng.randrange(12), is_thinking=rng.random() < 0.5)
    taken: list[int] = []

    def step() -> None:
        choices = sorted(allowed(grammar))
        ids = spell(rng.choice(pieces)) if len(choices) > 1 else choices
        wanted = grammar.validate_tokens(ids)
        before = grammar.fill_bitmask()
        assert grammar.accept_tokens(ids) == (wanted == ids)
        taken.extend(wanted)
        if rng.random() < 0.4:
            grammar.rollback(len(wanted))
            assert grammar.fill_bitmask() == before
            del taken[len(taken) - len(wanted) :]

    for _ in range(40):
        step()
    fresh = ThinkingGrammar(None, grammar._budget, VOCABULARY)
    assert fresh.accept_tokens(taken)
    assert fresh.fill_bitmask() == grammar.fill_bitmask()


@pytest.mark.parametrize("seed", range(10))
def test_around_a_grammar(seed: int) -> None:
    """Thoughts of any length, then JSON: the budget cuts the thoughts, and the JSON is kept."""
    compiler = LLGuidanceCompiler(lambda: VOCABULARY)
    lark = f'start: thoughts answer\nthoughts[suffix="{END}"]: /(?s:.*)/\n'
    lark += 'answer: %json {"enum": [true, {"id": null}]}\n'
    params = StructuredOutputsParams(grammar=lark, thinking=budget(7))
    compiler.validate(params)
    grammar = compiler.compile(params, [0]).result()
    rng = random.Random(seed)
    ids: list[int] = []
    while not grammar.is_terminated():
        mask = int.from_bytes(grammar.fill_bitmask(), "little")
        choices = [i for i in range(SIZE) if mask >> i & 1]
        ids.append(rng.choice(choices))
        assert grammar.accept_tokens(ids[-1:])
    compiler.close()
    thoughts, _, answer = text_of(ids).partition(END)
    assert json.loads(answer.removesuffix("<|eos|>")) in (True, {"id": None})
    num_thoughts = next(n for n in range(len(ids)) if END in text_of(ids[: n + 1]))
    assert num_thoughts <= 7 + 3 + len(END), thoughts  # 3: the bytes that end a character


def test_without_a_text_to_compile() -> None:
    compiler = LLGuidanceCompiler(lambda: VOCABULARY)
    params = StructuredOutputsParams(thinking=budget(2))
    compiler.validate(params)
    future = compiler.compile(params, [0])
    grammar = future.result()
    assert future.done()
    assert grammar.accept_tokens(spell("ab"))
    assert grammar.validate_tokens(spell("c")) == []
    compiler.close()
