"""A bound on a model's reasoning: when it is used up, the tag that ends reasoning is forced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostep.contracts.grammar import Grammar, GrammarFuture
from twostep.contracts.sampling import ThinkingBudget
from twostep.structured_output.grammar import accepted_prefix
from twostep.structured_output.tokenizer import Vocabulary


class ThinkingGrammar:
    """A ``Grammar`` that lets a request think for so many tokens, around another one or none.

    Tokens between the tags count, whatever they are; the tags are looked for in the text's bytes,
    because a model may spell them in several ways.
    """

    def __init__(
        self, inner: Grammar | None, budget: ThinkingBudget, vocabulary: Vocabulary
    ) -> None:
        """``inner`` constrains the whole text, tags and all; None: it is free."""
        self._inner = inner
        self._budget = budget
        self._vocabulary = vocabulary
        self._tags = (budget.start.encode(), budget.end.encode())
        """What is looked for outside of reasoning, and inside."""
        self._is_thinking = budget.is_thinking
        self._tail = b""
        """The last bytes, which may be the beginning of a tag."""
        self._used = 0
        """Tokens of reasoning so far."""
        self._forced = 0
        """Tokens of the forced tag that have come."""
        self._history: list[tuple[bool, bytes, int, int]] = []
        """The state before each token, for ``rollback``."""

    def _next_forced(self) -> int | None:
        """The one token that may come; None: the budget does not matter now.

        The tag waits while the inner grammar has no place for it: in the middle of a character.
        """
        if not self._is_thinking or self._used < self._budget.max_tokens:
            return None
        forced = self._budget.end_token_ids[self._forced]
        if self._forced == 0 and self._inner is not None:
            return forced if self._inner.validate_tokens([forced]) else None
        return forced

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over tokens; False at the first one that is not allowed."""
        for token_id in token_ids:
            forced = self._next_forced()
            if forced is not None and token_id != forced:
                return False
            if self._inner is not None and not self._inner.accept_tokens([token_id]):
                return False
            self._history.append((self._is_thinking, self._tail, self._used, self._forced))
            if forced is not None:
                self._forced += 1
                if self._forced == len(self._budget.end_token_ids):
                    self._is_thinking, self._tail, self._forced = False, b"", 0
            else:
                self._used += self._is_thinking
                self._read(self._bytes_of(token_id))
        return True

    def _read(self, data: bytes) -> None:
        text = self._tail + data
        while True:
            tag = self._tags[self._is_thinking]
            at = text.find(tag)
            if at < 0:
                self._tail = text[max(0, len(text) - len(tag) + 1) :]
                return
            text = text[at + len(tag) :]
            self._is_thinking = not self._is_thinking

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._vocabulary.token_bytes
        return known[token_id] if 0 <= token_id < len(known) else b""

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The longest prefix that would be accepted; the state does not change."""
        return accepted_prefix(self, token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back."""
        if not num_tokens:
            return
        if self._inner is not None:
            self._inner.rollback(num_tokens)
        self._is_thinking, self._tail, self._used, self._forced = self._history[-num_tokens]
        del self._history[-num_tokens:]

    def is_terminated(self) -> bool:
        """Whether the inner grammar says so; without one the request's own ends do."""
        return self._inner is not None and self._inner.is_terminated()

    def fill_bitmask(self) -> bytes:
        """What the inner grammar allows, and of the forced tag's tokens the next one only."""
        size = self._vocabulary.size
        if self._inner is not None:
            mask = int.from_bytes(self._inner.fill_bitmask(), "little")
        else:
            mask = (1 << size) - 1
        forced = self._next_forced()
        if forced is not None:
            mask &= 1 << forced
        return mask.to_bytes(4 * self._vocabulary.num_words, "little")


class ThinkingFuture:
    """A ``GrammarFuture``: done when the inner grammar and the vocabulary are."""

    def __init__(
        self,
        inner: GrammarFuture | None,
        budget: ThinkingBudget,
        vocabulary: Callable[[], Vocabulary],
        is_loaded: Callable[[], bool],
    ) -> None:
        """``vocabulary`` returns at once when ``is_loaded`` says so."""
        self._inner = inner
        self._budget = budget
        self._vocabulary = vocabulary
        self._is_loaded = is_loaded

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return (self._inner is None or self._inner.done()) and self._is_loaded()

    def result(self) -> ThinkingGrammar:
        """The grammar in its first state; raises what compiling raised."""
        inner = None if self._inner is None else self._inner.result()
        return ThinkingGrammar(inner, self._budget, self._vocabulary())
