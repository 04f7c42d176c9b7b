"""Log-probabilities in the two shapes of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twostep.contracts.results import Logprob
from twostep.frontend.tokenizer import Tokenizer
from twostep.server.protocol.chat import ChatTokenLogprob, TokenLogprob
from twostep.server.protocol.completions import CompletionLogprobs

LOWEST = -9999.0
"""JSON has no minus infinity."""


def shown_logprobs(top: int | None, token_ids: Sequence[int] | None) -> int:
    """How many candidates of a position are shown: the ``top`` likeliest, or all that were asked
    for by ``token_ids``, the chosen one included."""
    return 1 + len(token_ids) if token_ids else top or 0


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST) if logprob == logprob else LOWEST


class LogprobNames:
    """How tokens are called: by their text, or as ``token_id:N``."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int, found: Logprob | None) -> str:
        """The name of a token."""
        if self._as_ids:
            return f"token_id:{token_id}"
        text = None if found is None else found.decoded_token
        return self._tokenizer.token_text(token_id) if text is None else text

    def spelled(self, token_id: int) -> list[int]:
        """The bytes of a token."""
        return list(self._tokenizer.token_bytes[token_id])

    # -- chat --------------------------------------------------------------------------------

    def chat(
        self, token_ids: Sequence[int], found: Sequence[dict[int, Logprob]], most: int
    ) -> list[ChatTokenLogprob]:
        """One entry for each token, with the ``most`` likeliest."""
        return [
            ChatTokenLogprob(
                token=self.name(token_id, entry[token_id]),
                logprob=finite(entry[token_id].logprob),
                bytes=self.spelled(token_id),
                top_logprobs=[
                    TokenLogprob(
                        token=self.name(other, logprob),
                        logprob=finite(logprob.logprob),
                        bytes=self.spelled(other),
                    )
                    for other, logprob in likeliest(entry, most)
                ],
            )
            for token_id, entry in zip(token_ids, found, strict=False)
        ]

    # -- completions -------------------------------------------------------------------------

    def completion(
        self,
        token_ids: Sequence[int],
        found: Sequence[dict[int, Logprob] | None],
        most: int,
        offset: int,
    ) -> tuple[CompletionLogprobs, int]:
        """Parallel lists for tokens whose text begins at ``offset``, and where it ends.

        The first token of a prompt has no entry: nothing predicts it.
        """
        out = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, entry in zip(token_ids, found, strict=False):
            chosen = None if entry is None else entry[token_id]
            name = self.name(token_id, chosen)
            out.tokens.append(name)
            out.text_offset.append(offset)
            out.token_logprobs.append(None if chosen is None else finite(chosen.logprob))
            out.top_logprobs.append(None if entry is None else self._by_name(entry, token_id, most))
            text = None if chosen is None else chosen.decoded_token
            offset += len(self._tokenizer.token_text(token_id) if text is None else text)
        return out, offset

    def _by_name(self, entry: dict[int, Logprob], chosen_id: int, most: int) -> dict[str, float]:
        """The chosen token and the likeliest; of several with one text the later are told by id."""
        named: dict[str, float] = {}
        picked = likeliest(entry, most)
        if all(token_id != chosen_id for token_id, _ in picked):
            picked = [*picked, (chosen_id, entry[chosen_id])]
        picked.sort(key=lambda item: item[0] != chosen_id)  # its text is the chosen token's
        for token_id, found in picked:
            name = self.name(token_id, found)
            named[name if name not in named else f"token_id:{token_id}"] = finite(found.logprob)
        return named


def likeliest(entry: dict[int, Logprob], most: int) -> list[tuple[int, Logprob]]:
    """The ``most`` likeliest tokens of a position, by rank."""
    if most <= 0:
        return []
    return sorted(entry.items(), key=lambda item: (-item[1].logprob, item[0]))[:most]


def prompt_logprobs(
    positions: Sequence[dict[int, Logprob] | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: {token id: {logprob, rank, decoded_token}} for each position."""
    if positions is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": finite(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token_id, found in entry.items()
        }
        for entry in positions
    ]
