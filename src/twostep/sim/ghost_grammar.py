"""Grammars for ghosts: which token is allowed depends on all the outputs before it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from twostep.contracts.clock import Clock
from twostep.contracts.sampling import StructuredOutputsParams
from twostep.sim.ghost_model import VOCAB

_WORDS = -(-VOCAB // 32)


def next_state(state: int, token: int) -> int:
    """State of a grammar after one more output; 0 before the first."""
    return (state * 31 + token + 1) % 1009


def is_allowed(state: int, token: int, modulus: int) -> bool:
    """All but one token in ``modulus`` (2 or more)."""
    return (state * 7 + token) % modulus != 0


class GhostGrammar:
    """The state of one request's constraint."""

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus
        self.states = [0]

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance; False at the first token that is not allowed."""
        for token in token_ids:
            if not is_allowed(self.states[-1], token, self.modulus):
                return False
            self.states.append(next_state(self.states[-1], token))
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The longest prefix that is allowed."""
        num_states = len(self.states)
        for index, token in enumerate(token_ids):
            if not self.accept_tokens([token]):
                del self.states[num_states:]
                return list(token_ids[:index])
        del self.states[num_states:]
        return list(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        del self.states[len(self.states) - num_tokens :]

    def is_terminated(self) -> bool:
        """Never: some token is always allowed."""
        return False

    def fill_bitmask(self) -> bytes:
        """The mask of the next token."""
        return _bitmask(self.states[-1], self.modulus)


@functools.lru_cache(maxsize=4096)
def _bitmask(state: int, modulus: int) -> bytes:
    bits = sum(1 << token for token in range(VOCAB) if is_allowed(state, token, modulus))
    return bits.to_bytes(4 * _WORDS, "little")


class GhostGrammarFuture:
    """A grammar that is ready at some moment of virtual time, or fails to compile."""

    def __init__(self, clock: Clock, ready_at: float, modulus: int) -> None:
        self._clock = clock
        self._ready_at = ready_at
        self._modulus = modulus

    def done(self) -> bool:
        """Whether the moment has come."""
        return self._clock.monotonic() >= self._ready_at

    def result(self) -> GhostGrammar:
        """The grammar; a modulus below 2 does not compile."""
        if self._modulus < 2:
            raise ValueError(f"no grammar has the modulus {self._modulus}")
        return GhostGrammar(self._modulus)


class GhostGrammarCompiler:
    """Compiles ``"MODULUS SECONDS"``, in that many seconds of virtual time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def compile(
        self, params: StructuredOutputsParams, end_token_ids: Collection[int]
    ) -> GhostGrammarFuture:
        """Start compiling."""
        assert params.grammar is not None
        modulus, seconds = params.grammar.split()
        return GhostGrammarFuture(
            self._clock, self._clock.monotonic() + float(seconds), int(modulus)
        )
