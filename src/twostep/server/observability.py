"""What the outside may know of a running server: /metrics, the log line, traces."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from twostep.contracts.stats import StatsListener
from twostep.frontend.async_llm import AsyncLLM
from twostep.metrics.buckets import make_buckets
from twostep.metrics.engine_metrics import EngineMetrics
from twostep.metrics.http_metrics import HttpMetrics
from twostep.metrics.log_line import ThroughputLog
from twostep.server.http import HttpCall
from twostep.server.settings import ServerSettings

if TYPE_CHECKING:
    from twostep.metrics.exposition import Exposition
    from twostep.metrics.tracing import RequestTracer


class Observability:
    """Counters from the start; the engine's once it is there."""

    def __init__(self, settings: ServerSettings) -> None:
        self.http = HttpMetrics()
        self.engine: EngineMetrics | None = None
        """Once the engine is loaded."""
        self.tracer: RequestTracer | None = None
        """With ``--otlp-traces-endpoint``, once the engine is loaded."""
        self._settings = settings
        self._exposition: Exposition | None = None
        self._log_task: asyncio.Task[None] | None = None
        self._listeners: list[StatsListener] = []

    def attach(self, engine: AsyncLLM) -> None:
        """Listen to a running engine, or to the one that took its place: counters go on.

        On its event loop. Raises UsageError for a bad setting.
        """
        if self.engine is None:
            self._make_listeners(engine)
        else:
            self.engine.on_restart()
        engine.stats_listeners.extend(self._listeners)

    def _make_listeners(self, engine: AsyncLLM) -> None:
        settings = self._settings
        name = settings.served_model_names[0]
        buckets = make_buckets(engine.info.max_model_len, settings.custom_histogram_buckets)
        self.engine = EngineMetrics(name, engine.info, buckets=buckets)
        listeners = self._listeners
        listeners.append(self.engine)
        if settings.otlp_traces_endpoint is not None:
            from twostep.metrics.tracing import RequestTracer, make_exporter

            self.tracer = RequestTracer(make_exporter(settings.otlp_traces_endpoint), name)
            listeners.append(self.tracer)
        if settings.log_stats_interval:
            log = ThroughputLog(time.monotonic())
            listeners.append(log)
            self._log_task = asyncio.create_task(_tick(log, settings.log_stats_interval))

    def rejected(self, reason: str) -> None:
        """A full queue turned a request away."""
        if self.engine is not None:
            self.engine.on_rejected(reason)

    async def close(self) -> None:
        """Stop the log, send the last spans."""
        if self._log_task is not None:
            self._log_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._log_task
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.shutdown)

    async def answer_metrics(self, call: HttpCall) -> None:
        """``/metrics``: counted on the loop, written in a thread."""
        if self._exposition is None:
            await asyncio.to_thread(_load_exposition)
        from twostep.metrics.exposition import Exposition, encode

        if self._exposition is None:
            self._exposition = Exposition(self.http, compat=self._settings.metrics_compat)
        self._exposition.engine = self.engine
        families = self._exposition.snapshot()
        body, content_type = await asyncio.to_thread(encode, families, call.header(b"accept") or "")
        await call.answer(body, content_type=content_type.encode())


def _load_exposition() -> None:
    """Import prometheus-client without holding up the event loop."""
    import twostep.metrics.exposition  # noqa: F401


async def _tick(log: ThroughputLog, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        log.tick(time.monotonic())
