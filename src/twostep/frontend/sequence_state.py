"""One generated sequence as the front end sees it: its tokens, text, log-probabilities, end."""

from __future__ import annotations

from collections.abc import Sequence

from twostep.contracts.outputs import EngineCoreOutput, TokenLogprobs
from twostep.contracts.request import FinishReason
from twostep.contracts.results import CompletionOutput, Logprob
from twostep.contracts.sampling import SamplingParams
from twostep.frontend.detokenizer import IncrementalDetokenizer
from twostep.frontend.stop_strings import StopStringMatcher
from twostep.frontend.tokenizer import Tokenizer


class SequenceState:
    """Takes the core's news of one sequence and knows what may be shown of it.

    ``stopped_by_text`` is set when a stop string ended the sequence: the core does not know yet.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        stop_texts: dict[int, str],
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stopped_by_text = False
        self._params = params
        self._stop_texts = stop_texts
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        self._matcher: StopStringMatcher | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, params.skip_special_tokens
            )
            if params.stop:
                self._matcher = StopStringMatcher(
                    [params.stop] if isinstance(params.stop, str) else params.stop
                )
        self._pieces: list[str] = []
        """Text that may be shown, in order; of a DELTA stream, what was not sent yet."""
        self._held = ""
        """Text behind it that may be the beginning of a stop string."""
        self._logprobs: list[dict[int, Logprob]] | None = None
        self._cumulative_logprob: float | None = None
        if params.logprobs is not None:
            self._logprobs, self._cumulative_logprob = [], 0.0
        self._sent_tokens = 0

    @property
    def num_unsent_tokens(self) -> int:
        """Tokens since the last ``take_output``."""
        return len(self.token_ids) - self._sent_tokens

    def update(self, output: EngineCoreOutput) -> None:
        """Append the new tokens; what follows a completed stop string is dropped."""
        ids, finish_reason = output.new_token_ids, output.finish_reason
        logprobs = output.new_logprobs if self._logprobs is not None else None
        # The id that made the core stop is part of the tokens, but its text is not shown.
        silent = finish_reason is not None and finish_reason == FinishReason.STOP
        silent = silent and not output.ends_with_text
        silent = silent and not self._params.include_stop_str_in_output
        for i, token_id in enumerate(ids):
            self.token_ids.append(token_id)
            if logprobs is not None:
                self._append_logprobs(logprobs[i])
            if self._detokenizer is None or (silent and i == len(ids) - 1):
                continue
            text = self._detokenizer.decode(token_id) or self._hidden_stop_text(token_id)
            if text and self._show(text):
                return
        if finish_reason is not None:
            self._finish(output)

    def _hidden_stop_text(self, token_id: int) -> str:
        """Text of a stop token that was asked for by name, though special tokens are hidden."""
        if self._detokenizer is None or not self._params.include_stop_str_in_output:
            return ""
        text = self._stop_texts.get(token_id)
        return "" if text is None else self._detokenizer.flush() + text

    def _show(self, text: str) -> bool:
        """Add text, keeping back what may be a stop string; whether one ended the sequence."""
        matcher = self._matcher
        if matcher is None or len(self.token_ids) <= self._params.min_tokens:
            self._pieces.append(text)
            return False
        match = matcher.feed(text)
        if match is None:
            text = self._held + text
            if self._params.include_stop_str_in_output:
                self._pieces.append(text)
                return False
            keep = len(text) - matcher.held
            self._held = text[keep:]
            if keep:
                self._pieces.append(text[:keep])
            return False
        end = len(self._held) + match.end
        if not self._params.include_stop_str_in_output:
            end -= len(match.stop)
        self._pieces.append((self._held + text)[:end])
        self._held = ""
        self.stopped_by_text = True
        self.finish_reason, self.stop_reason = str(FinishReason.STOP), match.stop
        return True

    def _finish(self, output: EngineCoreOutput) -> None:
        assert output.finish_reason is not None
        self._end_text()
        self.finish_reason = str(output.finish_reason)
        self.stop_reason = output.stop_reason
        if isinstance(output.stop_reason, int):
            self.stop_reason = self._stop_texts.get(output.stop_reason, output.stop_reason)

    def _end_text(self) -> None:
        """Nothing more will come: show what was kept back."""
        tail = self._held + (self._detokenizer.flush() if self._detokenizer is not None else "")
        self._held = ""
        if tail:
            self._pieces.append(tail)

    def abort(self) -> None:
        """End the sequence from outside."""
        self._end_text()
        self.finish_reason = str(FinishReason.ABORT)

    def _append_logprobs(self, position: TokenLogprobs) -> None:
        """Of a token that is about to be decoded."""
        assert self._logprobs is not None
        assert self._cumulative_logprob is not None
        pending = self._detokenizer.pending if self._detokenizer is not None else b""
        is_ranked = self._params.logprob_token_ids is None
        self._logprobs.append(
            named_logprobs(position, self._tokenizer, pending, is_ranked=is_ranked)
        )
        self._cumulative_logprob += position.logprobs[0]

    def take_output(self, *, delta: bool) -> CompletionOutput:
        """What to tell the user now: all so far, or (``delta``) what the last one did not have."""
        from_token = self._sent_tokens if delta else 0
        pieces = self._pieces
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        self._pieces = [] if delta else [text]
        self._sent_tokens = len(self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[from_token:],
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[from_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def named_logprobs(
    position: TokenLogprobs, tokenizer: Tokenizer | None, pending: bytes, *, is_ranked: bool = True
) -> dict[int, Logprob]:
    """{token id: Logprob} of one position; ``pending`` are the bytes of an unfinished character.

    The chosen token comes first; the others follow by rank or, if not ``is_ranked``, as they were
    asked for, and then their ranks are not known.
    """
    named: dict[int, Logprob] = {}
    for i, token_id in enumerate(position.token_ids):
        if token_id not in named:
            text = None if tokenizer is None else tokenizer.token_text(token_id, pending)
            rank = position.rank if i == 0 else i if is_ranked else None
            named[token_id] = Logprob(position.logprobs[i], rank, text)
    return named


def named_prompt_logprobs(
    positions: Sequence[TokenLogprobs], prompt_token_ids: Sequence[int], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    """One entry for each prompt token; the first is None, as nothing predicts it."""
    named: list[dict[int, Logprob] | None] = [None]
    walker = None if tokenizer is None else IncrementalDetokenizer(tokenizer, (), False)
    for position, token_id in zip(positions, prompt_token_ids, strict=False):
        if walker is not None:
            walker.decode(token_id)
        named.append(named_logprobs(position, tokenizer, walker.pending if walker else b""))
    return named
