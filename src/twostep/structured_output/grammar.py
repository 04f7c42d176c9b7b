"""The constraint of one request: which token may come next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from twostep.contracts.grammar import Grammar
from twostep.structured_output.tokenizer import Vocabulary

if TYPE_CHECKING:
    import llguidance


class LLGuidanceGrammar:
    """A ``Grammar`` on a matcher of llguidance.

    The request's end tokens are no part of the text: they are allowed where the grammar may end,
    and nowhere else, even if the grammar has a place for their bytes.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        end_token_ids: Collection[int],
    ) -> None:
        """The matcher belongs to this object. ``end_token_ids``: what ends the request; empty if
        it ignores them, and then the model's own are allowed only where nothing else is."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._request_ends = frozenset(i for i in end_token_ids if 0 <= i < vocabulary.size)
        self._ends = self._request_ends | frozenset(vocabulary.end_ids)
        self._has_ended = False
        """Whether the last accepted token was an end token."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over tokens; False at the first one that is not allowed. Those before it stay
        accepted, and the grammar is of use."""
        for token_id in token_ids:
            if self._has_ended:
                return False
            if token_id in self._ends:
                if not self._matcher.is_accepting():
                    return False
                self._has_ended = True
            elif self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token_id]):
                return False
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The longest prefix that would be accepted; the state does not change."""
        return accepted_prefix(self, token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back."""
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise RuntimeError(f"the grammar cannot go back: {self._matcher.get_error()}")

    def is_terminated(self) -> bool:
        """Whether the output is complete: an end token came, or nothing else may come."""
        return self._has_ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def fill_bitmask(self) -> bytes:
        """The mask of the next token; the GIL is free meanwhile.

        All zero if the matcher has met one of its limits: then the request ends with an error.
        """
        size = self._vocabulary.size
        bits = bytearray(4 * self._vocabulary.num_words)
        may_end = self._has_ended
        if not self._has_ended:
            mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                return bytes(bits)
            bits[:] = mask[: len(bits)]
            if size & 31:
                bits[size >> 3] &= ~(1 << (size & 7))
            may_end = self._matcher.is_accepting()
        ends = self._request_ends
        if may_end and not ends and not any(bits):
            ends = self._ends
        for token_id in ends:
            if may_end:
                bits[token_id >> 3] |= 1 << (token_id & 7)
            else:
                bits[token_id >> 3] &= ~(1 << (token_id & 7))
        return bytes(bits)


def accepted_prefix(grammar: Grammar, token_ids: Sequence[int]) -> list[int]:
    """The longest prefix that a grammar would accept, found by trying; its state is as before."""
    num_accepted = 0
    while num_accepted < len(token_ids) and grammar.accept_tokens([token_ids[num_accepted]]):
        num_accepted += 1
    grammar.rollback(num_accepted)
    return list(token_ids[:num_accepted])
