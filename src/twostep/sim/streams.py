"""What a simulated client has seen of one request, compared with the request alone."""

from __future__ import annotations

import struct
from hashlib import sha256

from twostep.contracts.outputs import EngineCoreOutput
from twostep.contracts.request import EngineCoreRequest, FinishReason
from twostep.contracts.sampling import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from twostep.sim.case import Add
from twostep.sim.ghost_grammar import is_allowed, next_state
from twostep.sim.ghost_model import VOCAB, chain, chain_all, first_value, pick
from twostep.sim.violation import Violation

EOS = 3
_ROOT = sha256(b"twostep: parent of the first block").digest()


def salt_name(salt: int) -> str | None:
    """A tenant's cache salt; 0 is nobody in particular."""
    return f"tenant {salt}" if salt else None


class ContentHashes:
    """The hash that a full block must have, by the KV that ends it. Computed from tokens alone."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.of: dict[int, bytes] = {}

    def add(self, parent: int | None, value: int, tokens: list[int], salt: int) -> None:
        """A block of these tokens, whose KV ends with ``value``; the one before with ``parent``."""
        parent_hash = None if parent is None else self.of[parent]
        self.of[value] = self.compute(parent_hash, tokens, salt_name(salt))

    @staticmethod
    def compute(parent: bytes | None, tokens: list[int], salt: str | None) -> bytes:
        """Chained, over 32-bit little-endian ids; the salt enters the first block only."""
        data = (parent or _ROOT) + struct.pack(f"<{len(tokens)}I", *tokens)
        if parent is None and salt is not None:
            data += struct.pack("<I", len(salt.encode())) + salt.encode()
        return sha256(data).digest()


class Stream:
    """One request from outside: what it asked, what it must get, what it got."""

    def __init__(self, add: Add, prompt: list[int], limit: int, hashes: ContentHashes | None):
        """``limit``: most tokens that it may get."""
        self.add = add
        self.limit = limit
        self.tokens = prompt
        """Prompt and what came."""
        self.num_prompt = len(prompt)
        self.stops = {*add.stops, EOS} if add.eos else set(add.stops)
        self.finish: FinishReason | None = None
        self.is_aborted = False
        self.is_abort_queued = False
        self.num_preemptions = 0
        self.num_failures = 0
        """Steps that it made fail."""
        self.num_first_hits = -1
        """Cached tokens at the first start, as the plan told them."""
        self.num_planned = 0
        """Tokens that plans have computed since it last started."""
        self.last_step = -1
        self._hashes = hashes
        self.block_size = hashes.block_size if hashes is not None else 0
        self._end = len(prompt) + limit
        self.is_pause_aborted = False
        self.has_bad_grammar = add.grammar is not None and add.grammar < 2
        self.ready_at = 0.0
        """When its grammar is compiled, in virtual seconds."""
        self._grammar_state = 0
        self._is_plain = False
        """Whether its next news can be taken on the short path."""
        self._value = first_value(add.salt)
        self._block_end: int | None = None
        self._position = 0
        self._take_prompt(prompt)

    @property
    def num_outputs(self) -> int:
        """Tokens that came."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_live(self) -> bool:
        """Whether the engine owes it something."""
        return self.finish is None and not self.is_aborted

    @property
    def may_have_ended(self) -> bool:
        """Whether the engine may have ended it without a step; the news can be on their way."""
        return self.is_pause_aborted or self.has_bad_grammar

    def request(self) -> EngineCoreRequest:
        """What the front end sends."""
        add = self.add
        structured = repetition = None
        if add.grammar is not None:
            text = f"{add.grammar} {add.grammar_seconds}"
            structured = StructuredOutputsParams(grammar=text)
        if add.repetition:
            repetition = RepetitionDetectionParams(max_pattern_size=2, min_count=add.repetition)
        return EngineCoreRequest(
            request_id=add.request_id,
            prompt_token_ids=list(self.tokens),
            sampling_params=SamplingParams(
                max_tokens=add.max_tokens,
                seed=add.salt,
                stop_token_ids=list(add.stops) or None,
                structured_outputs=structured,
                repetition_detection=repetition,
                logprobs=0 if add.logprobs else None,
                prompt_logprobs=0 if add.prompt_logprobs else None,
            ),
            eos_token_id=EOS if add.eos else None,
            arrival_time=add.arrival,
            client_index=add.client,
            priority=add.priority,
            cache_salt=salt_name(add.salt),
        )

    def receive(self, output: EngineCoreOutput, client: int) -> None:
        """News from the engine."""
        if self.finish is not None or self.is_aborted:
            self._receive_late(output)
            return
        if client != self.add.client:
            raise Violation("I11", f"news of {self.add.request_id} went to client {client}")
        new = output.new_token_ids
        finish = output.finish_reason
        if (
            self._is_plain
            and finish is None
            and len(new) == 1
            and pick(self._value) == new[0]
            and new[0] not in self.stops
            and len(self.tokens) + 1 < self._end
        ):
            # Most news of most requests. Whatever looks odd is told by the long way.
            self.tokens.append(new[0])
            self._advance(new[0])
            if output.num_preemptions != self.num_preemptions:
                self._report_preemptions(output)
        else:
            self._receive_special(output, new, finish)

    def _receive_late(self, output: EngineCoreOutput) -> None:
        """An end without a step may be on its way when the client's abort comes."""
        if self.finish is not None or not self.may_have_ended or output.new_token_ids:
            raise Violation("I10", f"news of {self.add.request_id} after its end")
        self._check_finish(output.finish_reason)

    def _receive_special(
        self, output: EngineCoreOutput, new: list[int], finish: FinishReason | None
    ) -> None:
        request_id = self.add.request_id
        if new and self.is_abort_queued:
            raise Violation("I10", f"tokens of {request_id} after its abort")
        if not new and finish is None:
            raise Violation("I11", f"news of {request_id} with nothing in it")
        if new and not self.num_outputs:
            self._check_first(output)
        if self.add.logprobs and new:
            rows = output.new_logprobs or []
            if [row.token_ids[0] for row in rows] != new:
                raise Violation("I11", f"logprobs of {request_id} are not those of its tokens")
        for token in new:
            self._check_token(token)
        if finish is not None:
            self._check_finish(finish)
        elif new and self._why_it_ends() is not None:
            raise Violation("I11", f"{request_id} reached its end and was not told")
        # An end without a step may come before the plan that tells of a preemption.
        is_told = finish not in (FinishReason.ERROR, FinishReason.ABORT)
        if is_told and output.num_preemptions != self.num_preemptions:
            self._report_preemptions(output)
        self._is_plain = not (
            self.add.logprobs
            or self.is_abort_queued
            or self.add.repetition
            or self.add.grammar is not None
        )

    def abort_queued(self) -> None:
        """An abort is on its way: no token may come any more, unless the engine fails."""
        self.is_abort_queued = True
        self._is_plain = False

    def _report_preemptions(self, output: EngineCoreOutput) -> None:
        raise Violation(
            "I11",
            f"{self.add.request_id} was preempted {self.num_preemptions} times, "
            f"its client was told {output.num_preemptions}",
        )

    def _check_token(self, token: int) -> None:
        right = self._right_token()
        if token != right:
            raise Violation(
                "I11",
                f"token {self.num_outputs} of {self.add.request_id} is {token}, "
                f"alone it would be {right}",
            )
        if self.num_outputs >= self.limit:
            raise Violation("I11", f"{self.add.request_id} got more than {self.limit} tokens")
        if self.num_outputs and self._why_it_ends() is not None:
            raise Violation("I11", f"{self.add.request_id} got a token after its end")
        self.tokens.append(token)
        self._advance(token)
        if self.add.grammar is not None:
            self._grammar_state = next_state(self._grammar_state, token)

    def _check_first(self, output: EngineCoreOutput) -> None:
        request_id = self.add.request_id
        stats = output.prefill_stats
        if stats is None or stats.num_prompt_tokens != self.num_prompt:
            raise Violation("I11", f"{request_id}: prompt tokens of its first news are {stats}")
        if stats.num_cached_tokens != self.num_first_hits:
            raise Violation(
                "I11",
                f"{request_id} was told {stats.num_cached_tokens} cached tokens, "
                f"the plan had {self.num_first_hits}",
            )
        rows = output.new_prompt_logprobs
        if not self.add.prompt_logprobs:
            if rows is not None:
                raise Violation("I11", f"{request_id} did not ask for prompt logprobs")
            return
        told = None if rows is None else [(row.token_ids[0], row.logprobs[0]) for row in rows]
        last = self.num_prompt - 1
        if told != [(self.tokens[p + 1], -float(p)) for p in range(last)]:
            raise Violation("I11", f"{request_id} got wrong prompt logprobs")

    def _check_finish(self, finish: FinishReason | None) -> None:
        self.finish = finish
        request_id = self.add.request_id
        if finish is FinishReason.ABORT and self.is_pause_aborted:
            return
        if finish is FinishReason.ERROR:
            if not self.add.fault and not self.has_bad_grammar:
                raise Violation("isolation", f"{request_id} is innocent and ended with an error")
            return
        right = self._why_it_ends()
        if finish is not right:
            raise Violation(
                "I11",
                f"{request_id} ended with {finish} after {self.num_outputs} of {self.limit} "
                f"tokens, alone it would be {right}",
            )

    def _right_token(self) -> int:
        """The next token of the request alone."""
        token = pick(self._value)
        modulus = self.add.grammar
        if modulus is not None:
            while not is_allowed(self._grammar_state, token, modulus):
                token = (token + 1) % VOCAB
        return token

    def _why_it_ends(self) -> FinishReason | None:
        """The end that the newest token makes; an end token wins over a limit."""
        if not self.num_outputs:
            return None
        if self.tokens[-1] in self.stops:
            return FinishReason.STOP
        if len(self.tokens) >= self._end:
            return FinishReason.LENGTH
        count = self.add.repetition
        for size in (1, 2):
            tail = self.tokens[max(self.num_prompt, len(self.tokens) - size * count) :]
            if count and len(tail) == size * count and tail == tail[:size] * count:
                return FinishReason.REPETITION
        return None

    def _take_prompt(self, prompt: list[int]) -> None:
        """The ghost model's KV of the prompt."""
        values = chain_all(self._value, prompt)
        if self.block_size:
            for end in range(self.block_size, len(prompt) + 1, self.block_size):
                self._value, self._position = values[end - 1], end
                self._note_block()
        if values:
            self._value, self._position = values[-1], len(prompt)

    def _advance(self, token: int) -> None:
        """The ghost model's KV of one more token."""
        self._value = chain(self._value, token)
        self._position += 1
        if self.block_size and self._position % self.block_size == 0:
            self._note_block()

    def _note_block(self) -> None:
        """A block has become full: which hash it must have."""
        hashes = self._hashes
        assert hashes is not None
        if self._value not in hashes.of:
            block = self.tokens[self._position - self.block_size : self._position]
            hashes.add(self._block_end, self._value, block, self.add.salt)
        self._block_end = self._value
