"""The seam to structured output: what the scheduler asks of a grammar, whoever compiles it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from twostep.contracts.sampling import StructuredOutputsParams


class Grammar(Protocol):
    """The state of one request's constraint. Owned by the request; a function of its outputs."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over tokens; False at the first one that is not allowed."""
        ...

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The longest prefix that would be accepted; the state does not change."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back."""
        ...

    def is_terminated(self) -> bool:
        """Whether the output is complete and nothing but an end may follow."""
        ...

    def fill_bitmask(self) -> bytes:
        """int32 words [ceil(vocab / 32)] of the next token: bit t & 31 of word t >> 5 = allowed."""
        ...


class GrammarFuture(Protocol):
    """A grammar that may still be compiling, off the engine's thread."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        ...

    def result(self) -> Grammar:
        """The grammar in its first state; raises what compiling raised."""
        ...


class GrammarCompiler(Protocol):
    """Turns constraints into grammars. Built by ``entrypoints`` and handed to the engine core."""

    def compile(
        self, params: StructuredOutputsParams, end_token_ids: Collection[int]
    ) -> GrammarFuture:
        """Start compiling; does not wait, and leaves errors to the future.

        ``end_token_ids`` end the request: allowed where the grammar may end, and only there.
        """
        ...
