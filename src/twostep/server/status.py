"""Health, readiness, version, load, models and what the server is."""

from __future__ import annotations

from typing import Any

import msgspec
import msgspec.structs

from twostep import __version__
from twostep.server.errors import ApiError, scrub
from twostep.server.http import HttpCall
from twostep.server.protocol.models import ModelCard, ModelList, ModelMeta
from twostep.server.protocol.status import HealthResponse, LoadResponse, VersionResponse
from twostep.server.state import ServerState


async def health(state: ServerState, call: HttpCall) -> None:
    """Empty 200 while the engine makes progress; else 503 and why."""
    why = await state.health()
    if why is None and state.status != "dead":
        await call.answer(b"")
        return
    await _unhealthy(state, call, why)


async def ready(state: ServerState, call: HttpCall) -> None:
    """Empty 200 while requests are taken; else 503 and why."""
    why = await state.health()
    if why is None and state.status == "ready":
        await call.answer(b"")
        return
    await _unhealthy(state, call, why)


async def live(state: ServerState, call: HttpCall) -> None:
    """200 whenever this process runs its loop."""
    await call.answer(b"")


async def _unhealthy(state: ServerState, call: HttpCall, why: str | None) -> None:
    status: str = state.status
    if status == "ready":
        engine = state.loaded_engine
        status = "dead" if engine is not None and engine.errored else "stalled"
    body = HealthResponse(status=status)
    if status in ("loading", "restarting"):
        body.phase, body.percent = state.phase, state.percent
    if status != "loading" and why is not None:
        body.error = scrub(why)
    await call.answer(msgspec.json.encode(body), 503, {"Retry-After": "1"})


async def version(state: ServerState, call: HttpCall) -> None:
    """The version of twostep."""
    await call.answer_json(VersionResponse(version=__version__))


async def load(state: ServerState, call: HttpCall) -> None:
    """Generation requests that have not ended."""
    await call.answer_json(LoadResponse(server_load=len(state.in_flight)))


async def list_models(state: ServerState, call: HttpCall) -> None:
    """A card for each served name."""
    cards = [_card(state, name) for name in state.settings.served_model_names]
    await call.answer_json(ModelList(data=cards))


async def retrieve_model(state: ServerState, call: HttpCall) -> None:
    """One card."""
    name: str = call.scope["path_params"]["model"]
    if name not in state.settings.served_model_names:
        names = ", ".join(state.settings.served_model_names)
        raise ApiError(
            "model_not_found",
            f"The model `{name[:200]}` does not exist; this server has {names}",
            "model",
        )
    await call.answer_json(_card(state, name))


def _card(state: ServerState, name: str) -> ModelCard:
    info = state.engine.info
    permission: dict[str, Any] = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": state.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return ModelCard(
        id=name,
        created=state.created,
        root=info.model,
        max_model_len=info.max_model_len,
        permission=[permission],
        meta=ModelMeta(
            n_params=info.num_parameters,
            size_bytes=info.weight_bytes or None,
            quantization=info.quantization,
            vocab_size=info.vocab_size,
        ),
    )


def _told_defaults(state: ServerState) -> dict[str, Any]:
    """What a request without parameters gets, under the names of the API."""
    params = state.default_params()
    names: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p")
    names += ("presence_penalty", "frequency_penalty", "repetition_penalty")
    return {name: getattr(params, name) for name in names}


async def server_info(state: ServerState, call: HttpCall) -> None:
    """What runs here, with which settings. Keys and paths are not told."""
    info = msgspec.structs.asdict(state.engine.info)
    info.pop("model_path", None)
    settings = msgspec.structs.asdict(state.settings)
    settings["api_keys"] = len(state.settings.api_keys)
    await call.answer_json(
        {
            "version": __version__,
            "status": state.status,
            "engine": info,
            "server": settings,
            "default_sampling_params": _told_defaults(state),
            "output_formats": state.formats,
            "system_fingerprint": state.system_fingerprint,
        }
    )
