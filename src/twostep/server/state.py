"""What all endpoints share: settings, the engine once it is loaded, and where the server stands."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, Literal

from twostep import __version__
from twostep.contracts.errors import EngineDeadError
from twostep.contracts.sampling import SamplingParams
from twostep.frontend.async_llm import AsyncLLM
from twostep.server.errors import ApiError, overloaded
from twostep.server.in_flight import InFlight, shutting_down
from twostep.server.observability import Observability
from twostep.server.parsers.formats import Formats, choose_formats
from twostep.server.settings import ServerSettings

Status = Literal["loading", "ready", "restarting", "draining", "dead"]


class ServerState:
    """Owned by the server; endpoints read it."""

    def __init__(
        self, settings: ServerSettings, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """On the running event loop. ``wall_clock`` gives ``created``, seconds since 1970."""
        self.settings = settings
        self.status: Status = "loading"
        self.phase = "start"
        """Of loading."""
        self.fraction = 0.0
        """How far that phase is, 0..1."""
        self.in_flight = InFlight(
            max_queued_reqs=settings.max_num_queued_reqs,
            max_queued_tokens=settings.max_num_queued_tokens,
            timeout=settings.request_timeout,
        )
        self.observability = Observability(settings)
        self.in_flight.on_rejected = self.observability.rejected
        self.system_fingerprint = ""
        self.default_chat_template_kwargs: dict[str, Any] = {}
        self.formats: Formats = choose_formats(None)
        """How this model writes tool calls and reasoning."""
        self._wall_clock = wall_clock
        self._engine: AsyncLLM | None = None
        self._defaults = SamplingParams()
        self.has_seen_token_ids = False
        """Whether a client has sent token ids to be embedded."""
        self.created = int(wall_clock())

    def now(self) -> int:
        """Seconds since 1970, for ``created``."""
        return int(self._wall_clock())

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.settings.served_model_names[0]

    def loading(self, phase: str, fraction: float) -> None:
        """The engine is being loaded."""
        self.phase, self.fraction = phase, fraction

    def ready(self, engine: AsyncLLM, defaults: SamplingParams, formats: Formats) -> None:
        """The engine is loaded, for the first time or again; ``defaults`` is what a request without
        parameters gets."""
        self.observability.attach(engine)
        self._engine = engine
        self._defaults = defaults
        self.formats = formats
        info = engine.info
        facts = f"{info.model_path}|{info.quantization}|{info.kv_cache_dtype}|{info.architecture}"
        digest = hashlib.sha256(facts.encode("utf-8", "replace")).hexdigest()[:8]
        self.system_fingerprint = f"twostep-{__version__}-{digest}"
        if self.status in ("loading", "restarting"):
            self.status = "ready"

    def restarting(self) -> None:
        """The engine core died, and is being started again."""
        self.status = "restarting"
        self.loading("start", 0.0)

    def default_params(self) -> SamplingParams:
        """A fresh copy of what a request without parameters gets."""
        return self._defaults.clone()

    @property
    def loaded_engine(self) -> AsyncLLM | None:
        """The engine, whatever its health; None while it is loaded."""
        return self._engine

    def check_room(self) -> None:
        """Raise ApiError unless requests are taken and one more may wait."""
        self.check_open()
        self.in_flight.check_room()

    def check_open(self) -> None:
        """Raise ApiError unless requests are taken."""
        if self.status == "loading":
            raise overloaded(
                f"the model is still being loaded: {self.phase} {self.percent} %", "loading"
            )
        if self.status == "draining" or self.status == "dead" or self._engine is None:
            raise shutting_down()
        if self.status == "restarting" or self._engine.errored:
            if not self.settings.max_core_restarts:
                raise shutting_down()
            raise overloaded(
                f"the engine died and is started again: {self.phase} {self.percent} %",
                "engine_restarting",
            )

    @property
    def engine(self) -> AsyncLLM:
        """The engine that takes requests. Raises ApiError (loading, shutting_down,
        engine_restarting)."""
        self.check_open()
        assert self._engine is not None
        return self._engine

    def check_generates(self) -> None:
        """Raise ApiError if the engine makes embeddings; nothing if there is no engine yet."""
        if self._engine is not None and self._engine.info.pooler is not None:
            raise ApiError(
                "unsupported_feature",
                "this model makes embeddings and generates no text; ask /v1/embeddings, or serve "
                "another model",
                "model",
            )

    @property
    def percent(self) -> int:
        """How far the phase of loading is."""
        return int(100 * min(1.0, max(0.0, self.fraction)))

    async def health(self) -> str | None:
        """Why the engine is not well; None if it is. Asks nobody who could be stuck."""
        if self._engine is None:
            return f"loading: {self.phase} {self.percent} %"
        try:
            await self._engine.check_health()
        except EngineDeadError as error:
            return str(error)
        return None

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (model_not_found) for a model that is not served. No name is fine."""
        names = self.settings.served_model_names
        if name and name not in names and self.settings.model_name_policy == "strict":
            raise ApiError(
                "model_not_found",
                f"The model `{name[:200]}` does not exist; this server has {', '.join(names)}",
                "model",
            )
