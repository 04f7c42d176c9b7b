"""Requests as users write them, to requests as the engine core wants them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import msgspec.structs

from twostep.config.engine import SchedulingPolicy
from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.pooling import Pooler, PoolingParams
from twostep.contracts.request import EngineCoreRequest
from twostep.contracts.sampling import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from twostep.frontend.pooling_checks import check_pooling_params
from twostep.frontend.sampling_checks import check_sampling_params
from twostep.frontend.tokenizer import Tokenizer

PromptType = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the mappings may hold
"cache_salt", and "prompt" beside the ids to be shown as the prompt's text."""

_INT64 = 2**64
_MAX_INT64 = 2**63 - 1


class ProcessedRequest(msgspec.Struct, frozen=True):
    """A request that may enter the engine core: one ``EngineCoreRequest`` for each sequence."""

    request_id: str
    """As the user named it."""
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    """Of the whole request, checked and normalised."""
    stop_texts: dict[int, str]
    """Stop strings that are special tokens: the core sees them as ids."""
    core_requests: list[EngineCoreRequest]
    pooling: PoolingParams | None = None
    """Of an embedding request, checked; ``params`` are the core's then."""


class InputProcessor:
    """Checks prompts and parameters; what it lets through, the engine can run.

    One instance for each engine; holds no state of requests.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        vocab_size: int,
        *,
        eos_token_id: int | None = None,
        extra_eos_token_ids: Sequence[int] = (),
        default_sampling_params: SamplingParams | None = None,
        limits: Limits | None = None,
        policy: SchedulingPolicy = "fcfs",
        check_grammar: Callable[[StructuredOutputsParams], None] | None = None,
        reject_long_max_tokens: bool = False,
        pooler: Pooler | None = None,
        seed_source: Callable[[], int] | None = None,
        id_source: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``vocab_size`` is the model's; ids the tokenizer lacks (padding) are refused too.

        Without a tokenizer prompts must be token ids. ``eos_token_id`` and
        ``extra_eos_token_ids`` default to the tokenizer's. ``reject_long_max_tokens`` refuses
        a ``max_tokens`` beyond the room left, instead of ending there with reason "length".
        ``check_grammar`` raises InvalidRequestError for a constraint that cannot be kept; without
        it the engine has no structured outputs. ``pooler``: the engine makes embeddings, and
        generates no text. ``seed_source`` gives integers of 63 bits, ``id_source`` short unique
        texts, ``clock`` wall-clock seconds.
        """
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.limits = limits or Limits()
        self.vocab_size = min(vocab_size, tokenizer.vocab_size) if tokenizer else vocab_size
        if eos_token_id is None and tokenizer is not None:
            eos_token_id = tokenizer.eos_token_id
            extra_eos_token_ids = (*extra_eos_token_ids, *tokenizer.extra_eos_token_ids)
        self.eos_token_id = eos_token_id
        self.extra_eos_token_ids = tuple(
            i for i in dict.fromkeys(extra_eos_token_ids) if i != eos_token_id
        )
        self._defaults = default_sampling_params or SamplingParams()
        self._policy = policy
        self._check_grammar = check_grammar
        self._pooler = pooler
        self._reject_long_max_tokens = reject_long_max_tokens
        self._seed_source = seed_source or (lambda: secrets.randbits(63))
        self._id_source = id_source or (lambda: secrets.token_hex(4))
        self._clock = clock

    def default_sampling_params(self) -> SamplingParams:
        """A fresh copy of what a request without parameters gets."""
        return self._defaults.clone()

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | None = None,
        *,
        client_index: int = 0,
        priority: int | None = None,
    ) -> ProcessedRequest:
        """Check one request and make its core requests; InvalidRequestError says what is wrong.

        ``n > 1`` gives children named "0_id", "1_id", ... whose seeds count up.
        """
        if isinstance(params, PoolingParams):
            return self._process_pooling(request_id, prompt, params, client_index, priority)
        if self._pooler is not None:
            raise InvalidRequestError(
                "this model makes embeddings and generates no text; ask for embeddings, or serve "
                "another model",
                "model",
                "unsupported_feature",
            )
        params = check_sampling_params(params or self._defaults, self.limits, self.vocab_size)
        if priority is not None:
            params.priority = priority
        self._check_features(params)
        text, ids, cache_salt = self._read_prompt(prompt)
        self._check_prompt(ids)
        self._fit_max_tokens(params, len(ids))
        self._spell_bad_words(params)
        stop_texts = self._stop_texts(params)
        core_params = self._core_params(params, stop_texts)
        internal_id = f"{request_id}-{self._id_source()}"
        children = [
            EngineCoreRequest(
                request_id=internal_id if params.n == 1 else f"{i}_{internal_id}",
                prompt_token_ids=ids,
                sampling_params=_child_params(core_params, i),
                eos_token_id=None if params.ignore_eos else self.eos_token_id,
                arrival_time=self._clock(),
                client_index=client_index,
                priority=params.priority,
                cache_salt=cache_salt,
            )
            for i in range(params.n)
        ]
        return ProcessedRequest(request_id, text, ids, params, stop_texts, children)

    def _process_pooling(
        self,
        request_id: str,
        prompt: PromptType,
        params: PoolingParams,
        client_index: int,
        priority: int | None,
    ) -> ProcessedRequest:
        """For the core it is a request of one token, in whose place the vector comes."""
        params = check_pooling_params(params, self._pooler)
        if priority is not None:
            params.priority = priority
        self._check_priority(params.priority)
        text, ids, cache_salt = self._read_prompt(prompt)
        if text == "" or not ids:
            raise InvalidRequestError("the text is empty; give at least one token", "prompt")
        if len(ids) > self.max_model_len:
            raise InvalidRequestError(
                # Clients look for these words.
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your text has {len(ids)} tokens; shorten it or set truncate_prompt_tokens",
                "prompt",
                "context_length_exceeded",
            )
        core_params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            seed=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = EngineCoreRequest(
            request_id=f"{request_id}-{self._id_source()}",
            prompt_token_ids=ids,
            sampling_params=core_params,
            eos_token_id=0,
            arrival_time=self._clock(),
            client_index=client_index,
            priority=params.priority,
            cache_salt=cache_salt,
        )
        return ProcessedRequest(request_id, text, ids, core_params, {}, [request], params)

    # The prompt ---------------------------------------------------------------------------------

    def _read_prompt(self, prompt: PromptType) -> tuple[str | None, list[int], str | None]:
        """Its text (if known), its ids, its cache salt."""
        if isinstance(prompt, str):
            return prompt, self._tokenize(prompt), None
        if isinstance(prompt, Mapping):
            salt = self._check_salt(prompt.get("cache_salt"))
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError("prompt must be text", "prompt")
            if ids is not None:
                return text, self._check_ids(ids), salt
            if text is not None:
                return text, self._tokenize(text), salt
            raise InvalidRequestError(
                'a prompt given as a mapping needs "prompt" or "prompt_token_ids"', "prompt"
            )
        return None, self._check_ids(prompt), None

    def _tokenize(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer; give prompt_token_ids", "prompt"
            )
        most = self.max_model_len * self.limits.max_prompt_chars_per_token
        if len(text) > most:
            raise InvalidRequestError(
                f"the prompt has {len(text)} characters; with max_model_len {self.max_model_len} "
                f"no more than {most} are read; shorten it",
                "prompt",
                "context_length_exceeded",
            )
        return self.tokenizer.encode(text)

    def _check_ids(self, ids: Any) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise InvalidRequestError(
                f"a prompt is text or a list of token ids, not {type(ids).__name__}", "prompt"
            )
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"the prompt has {str(token_id)[:40]!r}, which is no token id; ids of this "
                    f"model are integers from 0 to {self.vocab_size - 1}",
                    "prompt",
                )
        return list(ids)

    def _check_salt(self, salt: Any) -> str | None:
        most = self.limits.max_cache_salt_chars
        if salt is not None and not (
            isinstance(salt, str) and 0 < len(salt) <= most and "\0" not in salt
        ):
            raise InvalidRequestError(
                f"cache_salt must be a text of 1 to {most} characters", "cache_salt"
            )
        return salt

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise InvalidRequestError(
                "the prompt is empty and this model adds no start token; give at least one token",
                "prompt",
            )
        if len(ids) >= self.max_model_len:
            raise InvalidRequestError(
                # Clients look for the first two sentences' words.
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt contains {len(ids)} input tokens, which leaves no room for an "
                "answer; shorten the prompt or raise max_model_len",
                "prompt",
                "context_length_exceeded",
            )

    # Parameters that depend on more than themselves ---------------------------------------------

    def _check_features(self, params: SamplingParams) -> None:
        if params.structured_outputs is not None:
            if self._check_grammar is None:
                raise InvalidRequestError(
                    "this engine has no structured outputs; leave structured_outputs out",
                    "structured_outputs",
                    "unsupported_feature",
                )
            self._check_grammar(params.structured_outputs)
        self._check_priority(params.priority)
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequestError(
                f"{name} needs a tokenizer and this model was loaded without one", name
            )

    def _check_priority(self, priority: int) -> None:
        if type(priority) is not int or not -_MAX_INT64 <= priority <= _MAX_INT64:
            raise InvalidRequestError("priority must be an integer of 64 bits", "priority")
        if priority and self._policy != "priority":
            raise InvalidRequestError(
                "priority needs the engine option --scheduling-policy priority", "priority"
            )

    def _fit_max_tokens(self, params: SamplingParams, prompt_len: int) -> None:
        room = self.max_model_len - prompt_len
        if params.max_tokens is not None and params.max_tokens > room:
            if self._reject_long_max_tokens:
                raise InvalidRequestError(
                    f"the prompt has {prompt_len} tokens and max_tokens is {params.max_tokens}: "
                    f"together more than max_model_len ({self.max_model_len}); "
                    f"ask for at most {room}",
                    "max_tokens",
                )
            params.max_tokens = room
        if params.max_tokens is None:
            params.max_tokens = room
        if params.min_tokens > params.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but behind a prompt of {prompt_len} tokens "
                f"there is room for {params.max_tokens} (max_model_len {self.max_model_len})",
                "min_tokens",
            )

    def _spell_bad_words(self, params: SamplingParams) -> None:
        """Each bad word as ids, at the start of a text and inside one (behind a space)."""
        if self.tokenizer is not None and params.bad_words:
            spellings = [*(params.bad_words_token_ids or [])]
            for word in params.bad_words:
                for text in (word, " " + word.lstrip()):
                    ids = self.tokenizer.encode(text, False, parse_special=True)
                    if ids and ids not in spellings:
                        spellings.append(ids)
            if sum(map(len, spellings)) > self.limits.max_bad_words_tokens:
                raise InvalidRequestError(
                    f"bad_words are {sum(map(len, spellings))} tokens together; at most "
                    f"{self.limits.max_bad_words_tokens} (max_bad_words_tokens) are allowed",
                    "bad_words",
                )
            params.bad_words_token_ids = spellings
        banned = {ids[0] for ids in params.bad_words_token_ids or [] if len(ids) == 1}
        if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
            raise InvalidRequestError(
                "bad_words forbids every token that allowed_token_ids allows", "bad_words"
            )

    def _stop_texts(self, params: SamplingParams) -> dict[int, str]:
        """Stop strings that are one special token, which text may not show, by its id."""
        texts: dict[int, str] = {}
        if self.tokenizer is not None:
            for stop in params.stop or []:
                token_id = self.tokenizer.special_token_id(stop)
                if token_id is not None:
                    texts.setdefault(token_id, stop)
        return texts

    def _core_params(self, params: SamplingParams, stop_texts: Mapping[int, str]) -> SamplingParams:
        core = params.clone()
        core.n = 1
        ids = [*(params.stop_token_ids or []), *stop_texts]
        if not params.ignore_eos:
            ids += self.extra_eos_token_ids
        core.stop_token_ids = list(dict.fromkeys(ids)) or None
        if core.seed is None:
            core.seed = self._seed_source()
        constraint = core.structured_outputs
        if constraint is not None and isinstance(constraint.json, dict):
            # As text: a schema may hold integers of any size, and what the core reads may not.
            schema = json.dumps(constraint.json)
            core.structured_outputs = msgspec.structs.replace(constraint, json=schema)
        return core


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of sequence ``index``: the same, but for the seed (which wraps at 64 bits)."""
    if not index:
        return params
    assert params.seed is not None
    child = params.clone()
    seed = (params.seed + index) % _INT64
    child.seed = seed - _INT64 if seed > _MAX_INT64 else seed
    return child
