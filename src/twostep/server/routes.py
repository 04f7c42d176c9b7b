"""The table of everything that can be asked: path, methods, structs, and who answers."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp

from twostep.server import status, tokenization
from twostep.server.chat import create_chat_completion
from twostep.server.completions import create_completion
from twostep.server.embeddings import create_embeddings
from twostep.server.http import HttpCall, JsonEndpoint, PlainEndpoint
from twostep.server.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from twostep.server.protocol.completions import CompletionRequest, CompletionResponse
from twostep.server.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from twostep.server.protocol.models import ModelCard, ModelList
from twostep.server.protocol.status import LoadResponse, VersionResponse
from twostep.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    RenderResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from twostep.server.state import ServerState


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One path of the API."""

    path: str
    methods: tuple[str, ...]
    summary: str
    app: ASGIApp
    request: Any = None
    """Struct of the body; None: it has none."""
    response: Any = None
    """Struct of a success; None: it has no JSON body."""
    streams: bool = False
    """Whether a success may be a stream of events."""
    waits: bool = False
    """Whether it may have to wait in the queue, and is refused if that is full."""


def operations(state: ServerState) -> list[Operation]:
    """All operations of the API."""
    return [*_generation(state), *_texts(state), *_status(state)]


def _generation(state: ServerState) -> list[Operation]:
    return [
        _post(
            state,
            "/v1/chat/completions",
            create_chat_completion,
            ChatCompletionRequest,
            ChatCompletionResponse,
            "Answer a conversation",
            streams=True,
            waits=True,
        ),
        _post(
            state,
            "/v1/completions",
            create_completion,
            CompletionRequest,
            CompletionResponse,
            "Continue a text",
            streams=True,
            waits=True,
        ),
        _post(
            state,
            "/v1/embeddings",
            create_embeddings,
            EmbeddingRequest,
            EmbeddingResponse,
            "Vectors of texts",
            waits=True,
        ),
    ]


def _texts(state: ServerState) -> list[Operation]:
    found = [
        _post(
            state,
            "/v1/chat/completions/render",
            tokenization.render_chat,
            ChatCompletionRequest,
            RenderResponse,
            "The prompt of a conversation",
        ),
        _post(
            state,
            "/v1/completions/render",
            tokenization.render_completion,
            CompletionRequest,
            RenderResponse | list[RenderResponse],
            "The prompts of a completion request",
        ),
    ]
    for prefix in ("", "/v1"):
        found += [
            _post(
                state,
                f"{prefix}/tokenize",
                tokenization.tokenize,
                TokenizeRequest,
                TokenizeResponse,
                "Token ids of a text or a conversation",
            ),
            _post(
                state,
                f"{prefix}/detokenize",
                tokenization.detokenize,
                DetokenizeRequest,
                DetokenizeResponse,
                "Text of token ids",
            ),
        ]
    return found


def _status(state: ServerState) -> list[Operation]:
    return [
        _get(state, "/v1/models", status.list_models, ModelList, "Served models"),
        _get(state, "/v1/models/{model:path}", status.retrieve_model, ModelCard, "One model"),
        _get(state, "/health", status.health, None, "Whether the engine makes progress"),
        _get(state, "/live", status.live, None, "Whether the server answers at all"),
        _get(state, "/ready", status.ready, None, "Whether requests are taken"),
        _get(state, "/ping", status.health, None, "As /health", methods=("GET", "POST")),
        _get(state, "/version", status.version, VersionResponse, "The version"),
        _get(state, "/load", status.load, LoadResponse, "Requests in flight"),
        _get(state, "/server_info", status.server_info, None, "Engine and settings"),
    ]


def _post(
    state: ServerState,
    path: str,
    handle: Callable[[ServerState, HttpCall, Any], Awaitable[None]],
    request: Any,
    response: Any,
    summary: str,
    *,
    streams: bool = False,
    waits: bool = False,
) -> Operation:
    most = state.settings.max_request_bytes
    check_room = state.check_room if waits else None
    return Operation(
        path=path,
        methods=("POST",),
        summary=summary,
        app=JsonEndpoint(request, functools.partial(handle, state), most, check_room),
        request=request,
        response=response,
        streams=streams,
        waits=waits,
    )


def _get(
    state: ServerState,
    path: str,
    handle: Callable[[ServerState, HttpCall], Awaitable[None]],
    response: Any,
    summary: str,
    methods: tuple[str, ...] = ("GET",),
) -> Operation:
    return Operation(
        path=path,
        methods=methods,
        summary=summary,
        app=PlainEndpoint(functools.partial(handle, state)),
        response=response,
    )
