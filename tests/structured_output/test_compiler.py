"""The compiler: off the caller's thread, once for equal constraints, within its cache."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from structured_output.conftest import EOS, VOCABULARY, Kit, allowed_ids, ids_of

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.sampling import StructuredOutputsParams
from twostep.structured_output import compiler as compiler_module
from twostep.structured_output.compiler import LLGuidanceCompiler
from twostep.structured_output.tokenizer import Vocabulary

ENDS = frozenset([EOS])


def regex(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


def test_nothing_is_loaded_before_the_first_constraint_and_only_once() -> None:
    threads = []

    def load() -> Vocabulary:
        threads.append(threading.current_thread().name)
        return VOCABULARY

    compiler = LLGuidanceCompiler(load)
    assert threads == []
    compiler.validate(regex("a"))
    compiler.validate(regex("b"))
    assert len(threads) == 1
    assert threads[0].startswith("twostep-grammar")
    compiler.close()


def test_compiling_does_not_wait() -> None:
    """Nor does an abort: whoever no longer wants the grammar just drops its future."""
    may_load = threading.Event()

    def load() -> Vocabulary:
        assert may_load.wait(30)
        return VOCABULARY

    compiler = LLGuidanceCompiler(load)
    dropped = compiler.compile(regex("a+"), ENDS)
    future = compiler.compile(regex("b+"), ENDS)
    assert not dropped.done()
    assert not future.done()
    del dropped
    may_load.set()
    assert EOS not in allowed_ids(future.result().fill_bitmask())
    assert future.done()
    compiler.close()


def test_a_constraint_is_checked_once_and_compiled_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit = Kit(Limits(max_cached_grammars=2))
    compiled = []
    real = LLGuidanceCompiler._compile

    def counting(self: LLGuidanceCompiler, source: compiler_module.GrammarSource) -> object:
        compiled.append(source.text)
        return real(self, source)

    monkeypatch.setattr(LLGuidanceCompiler, "_compile", counting)
    for _ in range(3):
        kit.compiler.validate(regex("a"))
    assert len(compiled) == 1
    kit.grammar(regex="a")  # takes what the check has made
    assert len(compiled) == 1
    kit.grammar(regex="a")
    assert len(compiled) == 2
    kit.compiler.validate(regex("a"))
    assert len(compiled) == 2
    for _ in range(3):  # a refusal is remembered as well
        with pytest.raises(InvalidRequestError):
            kit.compiler.validate(regex("["))
        with pytest.raises(InvalidRequestError):
            kit.grammar(regex="[")
    assert len(compiled) == 3
    kit.compiler.validate(regex("b"))  # drops "a"
    kit.compiler.validate(regex("a"))
    assert len(compiled) == 5
    kit.compiler.close()


def test_requests_with_one_constraint_do_not_share_its_state(kit: Kit) -> None:
    one, other = kit.grammar(regex="ab"), kit.grammar(regex="ab")
    before = other.fill_bitmask()
    assert one.accept_tokens(ids_of("ab"))
    assert one.is_terminated()
    assert other.fill_bitmask() == before
    assert not other.is_terminated()


def test_a_mask_does_not_depend_on_strangers(kit: Kit, make_kit: Callable[..., Kit]) -> None:
    """The same grammar alone in a compiler, and beside others that went far."""
    params = {"json": {"type": "array", "items": {"type": "string", "pattern": "^(ab|a+b)*$"}}}
    alone = make_kit()
    for seed in range(5):
        kit.walk(kit.grammar(**params), seed)
    tokens = alone.walk(alone.grammar(**params), seed=9)
    mine, lonely = kit.grammar(**params), alone.grammar(**params)
    for token in tokens:
        assert mine.fill_bitmask() == lonely.fill_bitmask()
        assert mine.accept_tokens([token])
        assert lonely.accept_tokens([token])
    alone.compiler.close()


def test_a_vocabulary_that_cannot_be_loaded_is_everybodys_error() -> None:
    def load() -> Vocabulary:
        raise OSError("the file has gone")

    compiler = LLGuidanceCompiler(load)
    for _ in range(2):
        with pytest.raises(OSError, match="the file has gone"):
            compiler.validate(regex("a"))
    compiler.close()


def test_who_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(LLGuidanceCompiler, "_compile", lambda self, source: may_end.wait(30))
    compiler = LLGuidanceCompiler(lambda: VOCABULARY, Limits(max_grammar_compile_seconds=0.01))
    with pytest.raises(ValueError, match="max_grammar_compile_seconds"):
        compiler.validate(regex("a"))
    may_end.set()
    compiler.close()
