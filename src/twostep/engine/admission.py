"""What can never be served is refused before it is queued, with the numbers."""

from __future__ import annotations

from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.request import EngineCoreRequest
from twostep.scheduler.scheduler import Scheduler


def check_admission(
    request: EngineCoreRequest, scheduler: Scheduler, *, can_structure: bool
) -> None:
    """Raise InvalidRequestError unless the request can run to at least one token, alone.

    ``can_structure``: whether the engine has a compiler of grammars.
    """
    params = request.sampling_params
    if request.request_id in scheduler.requests:
        raise InvalidRequestError(
            f"request id {request.request_id} is in use: choose another", "request_id"
        )
    if params.max_tokens is None or params.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {params.max_tokens}: ask for 1 or more", "max_tokens"
        )
    if params.structured_outputs is not None and not can_structure:
        raise InvalidRequestError(
            "structured outputs are not supported: leave structured_outputs out",
            "structured_outputs",
        )
    _check_prompt_length(len(request.prompt_token_ids), scheduler)


def _check_prompt_length(length: int, scheduler: Scheduler) -> None:
    max_model_len = scheduler.config.max_model_len
    if length == 0:
        raise InvalidRequestError("the prompt is empty: give it at least one token", "prompt")
    if length >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {length} tokens and max_model_len is {max_model_len}, which leaves "
            f"no room for an answer: shorten the prompt or raise --max-model-len",
            "prompt",
            "context_length_exceeded",
        )
    if length >= scheduler.max_seq_tokens:
        kv = scheduler.kv_cache_manager
        raise InvalidRequestError(
            f"the prompt has {length} tokens and needs {length // kv.block_size + 1} KV blocks "
            f"of {kv.block_size} tokens to answer, but the KV cache has "
            f"{kv.pool.num_usable_blocks} ({scheduler.max_seq_tokens} tokens): shorten the prompt "
            f"or give the KV cache more memory",
            "prompt",
            "context_length_exceeded",
        )


def check_token_ids(request: EngineCoreRequest, vocab_size: int) -> None:
    """Raise InvalidRequestError if a number that will be an index is none.

    The front end has checked all of them, with better words. The core does not rely on it.
    """
    params = request.sampling_params
    ids = {
        "prompt": request.prompt_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": list(params.logit_bias or ()),
        "bad_words": [i for word in params.bad_words_token_ids or () for i in word],
        "eos_token_id": None if request.eos_token_id is None else [request.eos_token_id],
    }
    for param, values in ids.items():
        if values and not (min(values) >= 0 and max(values) < vocab_size):
            raise InvalidRequestError(
                f"{param} has a token id outside 0 to {vocab_size - 1}", param, "invalid_token_id"
            )
