"""What grammars say, in a recording: enough to plan again without them, and without their masks.

A grammar moves the core when it becomes ready, fails to compile, refuses a token, cuts drafts off
and ends its text. Only that is told; that it is not ready, allows a token or goes on is the rule.
Grammars are numbered in the order in which their compiling began. As one step may bring several
tokens, "refused" and "ended" come with the number of tokens that were accepted before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from twostep.contracts.grammar import Grammar, GrammarCompiler, GrammarFuture
from twostep.contracts.sampling import StructuredOutputsParams

GrammarNews = Literal["ready", "failed", "refused", "cut", "ended"]


class GrammarListener(Protocol):
    """Writes down what grammars say."""

    def grammar_said(self, number: int, news: GrammarNews, detail: int | str | None = None) -> None:
        """``detail``: why it failed, how many drafts were kept, or how many tokens accepted."""
        ...


class RecordedCompiler:
    """A ``GrammarCompiler`` whose grammars are listened to."""

    def __init__(self, inner: GrammarCompiler, listener: GrammarListener) -> None:
        self._inner = inner
        self._listener = listener
        self._next = 0

    def compile(
        self, params: StructuredOutputsParams, end_token_ids: Collection[int]
    ) -> GrammarFuture:
        """Start compiling."""
        self._next += 1
        inner = self._inner.compile(params, end_token_ids)
        return _RecordedFuture(inner, self._next - 1, self._listener)


class _RecordedFuture:
    def __init__(self, inner: GrammarFuture, number: int, listener: GrammarListener) -> None:
        self._inner = inner
        self._number = number
        self._listener = listener
        self._was_ready = False

    def done(self) -> bool:
        if not self._was_ready and self._inner.done():
            self._was_ready = True
            self._listener.grammar_said(self._number, "ready")
        return self._was_ready

    def result(self) -> Grammar:
        try:
            return _RecordedGrammar(self._inner.result(), self._number, self._listener)
        except Exception as error:
            self._listener.grammar_said(self._number, "failed", str(error))
            raise


class _RecordedGrammar:
    def __init__(self, inner: Grammar, number: int, listener: GrammarListener) -> None:
        self._inner = inner
        self._number = number
        self._listener = listener
        self._length = 0

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            if not self._inner.accept_tokens([token_id]):
                self._listener.grammar_said(self._number, "refused", self._length)
                return False
            self._length += 1
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        kept = self._inner.validate_tokens(token_ids)
        if len(kept) < len(token_ids):
            self._listener.grammar_said(self._number, "cut", len(kept))
        return kept

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        self._length -= num_tokens

    def is_terminated(self) -> bool:
        ended = self._inner.is_terminated()
        if ended:
            self._listener.grammar_said(self._number, "ended", self._length)
        return ended

    def fill_bitmask(self) -> bytes:
        return self._inner.fill_bitmask()


class GrammarMemory(Protocol):
    """Remembers what grammars said, in its order."""

    def grammar_news(
        self, number: int, news: GrammarNews, length: int | None = None
    ) -> tuple[int | str | None] | None:
        """The detail, if this is what comes next in the recording; None: it did not say that.

        With ``length`` only if that is the detail.
        """
        ...


class ReplayedCompiler:
    """A ``GrammarCompiler`` whose grammars say what they said."""

    def __init__(self, memory: GrammarMemory) -> None:
        self._memory = memory
        self._next = 0

    def compile(
        self, params: StructuredOutputsParams, end_token_ids: Collection[int]
    ) -> GrammarFuture:
        """A grammar that is ready when it was ready."""
        self._next += 1
        return _Replayed(self._memory, self._next - 1)


class _Replayed:
    """A future and, once it is ready, its own result."""

    def __init__(self, memory: GrammarMemory, number: int) -> None:
        self._memory = memory
        self._number = number
        self._is_ready = False
        self._length = 0

    def done(self) -> bool:
        self._is_ready = self._is_ready or self._said("ready") is not None
        return self._is_ready

    def result(self) -> Grammar:
        if (failure := self._said("failed")) is not None:
            raise RuntimeError(failure[0])
        return self

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        for _ in token_ids:
            if self._said("refused", self._length) is not None:
                return False
            self._length += 1
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        kept = self._said("cut")
        if kept is None:
            return list(token_ids)
        assert isinstance(kept[0], int)
        return list(token_ids[: kept[0]])

    def rollback(self, num_tokens: int) -> None:
        self._length -= num_tokens

    def is_terminated(self) -> bool:
        return self._said("ended", self._length) is not None

    def fill_bitmask(self) -> bytes:
        """Nobody samples."""
        return b""

    def _said(self, news: GrammarNews, length: int | None = None) -> tuple[int | str | None] | None:
        return self._memory.grammar_news(self._number, news, length)
