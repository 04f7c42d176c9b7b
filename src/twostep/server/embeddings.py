"""``/v1/embeddings``."""

from __future__ import annotations

import base64
import logging
import sys
from array import array
from collections.abc import Sequence

import msgspec

from twostep.contracts.pooling import PoolingParams
from twostep.contracts.results import RequestOutput
from twostep.server.errors import ApiError, shown
from twostep.server.generation import Generation, Job
from twostep.server.http import HttpCall
from twostep.server.prompts import CHARS_PER_TOKEN, Prompt, off_loop, split_prompts
from twostep.server.protocol.embeddings import (
    EmbeddingData,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
)
from twostep.server.request_fields import answer_id, cache_salt, request_priority
from twostep.server.state import ServerState

logger = logging.getLogger(__name__)


async def create_embeddings(state: ServerState, call: HttpCall, request: EmbeddingRequest) -> None:
    """Serve one request."""
    state.check_open()
    state.check_model(request.model)
    if state.engine.info.pooler is None:
        raise ApiError(
            "unsupported_feature",
            "this model generates text and makes no embeddings; serve it with --convert embed, "
            "or serve an embedding model",
            "model",
        )
    _check_choice("encoding_format", request.encoding_format, ("float", "base64"))
    _check_choice("embed_dtype", request.embed_dtype, ("float32",))
    _check_choice("endianness", request.endianness, ("native", "little", "big"))
    params = PoolingParams(
        dimensions=request.dimensions,
        normalize=request.normalize,
        priority=request_priority(call, request),
    )
    prompts = await embedding_prompts(state, request)
    name = answer_id("embd", call, request)
    if state.settings.enable_log_requests:
        logger.info("request %s: %d texts, %s", name, len(prompts), params)
    generation = Generation(
        state,
        call,
        [Job(prompt.engine_prompt, prompt.num_tokens, params) for prompt in prompts],
        name=name,
        cache_salt=cache_salt(request),
        param_names={"prompt": "input"},
    )
    await generation.answer(EmbeddingWriter(state, request, name), stream=False)


def _check_choice(name: str, value: str | None, allowed: Sequence[str]) -> None:
    if value is not None and value not in allowed:
        raise ApiError(
            "invalid_value",
            f"{name} is {shown(value, 40)!r}; it must be {' or '.join(allowed)}",
            name,
        )


# -- texts --------------------------------------------------------------------------------------


async def embedding_prompts(state: ServerState, request: EmbeddingRequest) -> list[Prompt]:
    """All texts of the request, in order. Raises ApiError or InvalidRequestError."""
    found = split_prompts(request.input, state.settings.max_prompts, "input")
    if not isinstance(found[0], str) and not state.has_seen_token_ids:
        state.has_seen_token_ids = True  # said once: some clients use another tokenizer
        logger.warning(
            "a client sends token ids to /v1/embeddings; they must be this model's "
            "(LangChain: check_embedding_ctx_length=False sends text instead)"
        )
    return [await _prompt(state, request, each) for each in found]


async def _prompt(state: ServerState, request: EmbeddingRequest, text: str | list[int]) -> Prompt:
    if text == "":
        raise ApiError("invalid_value", "input is empty; give at least one token", "input")
    special = request.add_special_tokens is not False
    keep = _most_tokens(state, request)
    if isinstance(text, str) and special and keep is None:
        return Prompt(text, max(1, len(text) // CHARS_PER_TOKEN))
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    if isinstance(text, str):
        tokenizer = state.engine.tokenizer
        ids = await off_loop(len(text), lambda: tokenizer.encode(text, special))
        if special:
            before, behind = tokenizer.special.prefix_ids, tokenizer.special.suffix_ids
    else:
        ids = text
    if keep is not None and len(ids) > keep:
        ids = _truncated(request, ids, keep, before, behind)
    prompt = {"prompt_token_ids": ids}
    return Prompt(prompt if not isinstance(text, str) else {**prompt, "prompt": text}, len(ids))


def _most_tokens(state: ServerState, request: EmbeddingRequest) -> int | None:
    """What ``truncate_prompt_tokens`` leaves of a text; -1 is all that the model reads."""
    keep, most = request.truncate_prompt_tokens, state.engine.info.max_model_len
    if keep is None or keep == -1:
        return None if keep is None else most
    if not 1 <= keep <= most:
        raise ApiError(
            "invalid_value",
            f"truncate_prompt_tokens is {shown(keep, 40)}; it must be -1 or from 1 to {most}",
            "truncate_prompt_tokens",
        )
    return keep


def _truncated(
    request: EmbeddingRequest,
    ids: list[int],
    keep: int,
    before: tuple[int, ...],
    behind: tuple[int, ...],
) -> list[int]:
    """The first (``truncation_side`` right, the default) or last tokens of a text.

    What the tokenizer puts ``before`` and ``behind`` it stays, as far as there is room.
    """
    side = request.truncation_side or "right"
    _check_choice("truncation_side", side, ("left", "right"))
    room = keep - len(before) - len(behind)
    if room < 1:
        return ids[:keep] if side == "right" else ids[-keep:]
    text = ids[len(before) : len(ids) - len(behind)]
    return [*before, *(text[:room] if side == "right" else text[-room:]), *behind]


# -- the answer ---------------------------------------------------------------------------------


class EmbeddingWriter:
    """Outputs to the one document."""

    def __init__(self, state: ServerState, request: EmbeddingRequest, name: str) -> None:
        self._name = name
        self._model = state.model_name
        self._created = state.now()
        self._as_base64 = request.encoding_format == "base64"
        self._endianness = request.endianness or "little"

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See AnswerWriter."""
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return msgspec.json.encode(
            EmbeddingResponse(
                id=self._name,
                created=self._created,
                model=self._model,
                data=[
                    EmbeddingData(index=index, embedding=self._encoded(output))
                    for index, output in enumerate(outputs)
                ],
                usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
            )
        )

    def _encoded(self, output: RequestOutput) -> list[float] | str:
        vector = output.embedding
        assert vector is not None, "failed requests were told before"
        if not self._as_base64:
            return vector
        values = array("f", vector)
        if (self._endianness == "big") != (sys.byteorder == "big"):
            values.byteswap()
        return base64.b64encode(values.tobytes()).decode()

    def events(self, index: int, output: RequestOutput) -> bytes:
        """See AnswerWriter; embeddings do not stream."""
        raise AssertionError("embeddings do not stream")

    def last_events(self) -> bytes:
        """See AnswerWriter; embeddings do not stream."""
        raise AssertionError("embeddings do not stream")
