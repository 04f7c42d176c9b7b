"""From a model's name to a running AsyncLLM."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.entrypoints.core_spec import CoreSpec
from twostep.entrypoints.engine_options import EngineOptions
from twostep.entrypoints.garbage import no_garbage
from twostep.entrypoints.progress import Advance
from twostep.entrypoints.resolve import ResolvedModel, resolve
from twostep.frontend.core_process import CoreProcess

if TYPE_CHECKING:
    from twostep.entrypoints.text_side import TextSide
    from twostep.frontend.async_llm import AsyncLLM

Progress = Callable[[str, float], None]
"""Called with (phase, fraction done 0..1)."""


async def start_async_llm(
    model: str | Path,
    options: EngineOptions | None = None,
    *,
    chat_template: str | None = None,
    reject_long_max_tokens: bool = False,
    on_progress: Progress | None = None,
    process: CoreProcess | None = None,
) -> AsyncLLM:
    """Start an engine core for ``model`` and wait until it is ready; the event loop stays free.

    Cancelling it leaves nothing behind. ``on_progress`` is called on the event loop.
    ``reject_long_max_tokens``: see InputProcessor. ``process``: what ``start_core_process`` has
    started for this model and these options already; it belongs to the engine from now on.

    Raises:
        ModelError, OutOfMemoryError, UsageError: One line with cause and cure.
    """
    options = options or EngineOptions()
    loop = asyncio.get_running_loop()

    def progress(phase: str, fraction: float) -> None:
        if on_progress is not None:
            loop.call_soon_threadsafe(on_progress, phase, fraction)

    try:
        resolved = await asyncio.to_thread(resolve, model, ProgressReporter(progress))
    except BaseException:
        if process is not None:
            process.abandon()
        raise
    process = process or start_core_process(resolved, options)
    # Imported now: all this is read while the core's process starts.
    from twostep.frontend.core_client import AsyncMPClient

    client = AsyncMPClient(process)
    try:
        text = await asyncio.to_thread(_load_text, resolved.path)
        info = await client.wait_until_ready(on_progress)
    except BaseException:
        await asyncio.shield(client.shutdown(kill=True))
        raise
    from twostep.entrypoints.grammars import compiler_for_text
    from twostep.frontend.async_llm import AsyncLLM

    return AsyncLLM(
        client,
        info,
        text.input_processor(
            info.max_model_len,
            info.vocab_size,
            options.scheduling_policy,
            reject_long_max_tokens=reject_long_max_tokens,
            check_grammar=compiler_for_text(text, info.vocab_size).validate,
            pooler=info.pooler,
        ),
        text.output_processor(),
        text.chat_prompter(chat_template),
        text.tokenizer,
    )


def start_core_process(model: ResolvedModel, options: EngineOptions) -> CoreProcess:
    """An engine core that begins to load."""
    return CoreProcess(
        lambda wire, heartbeat: CoreSpec(
            wire=wire,
            heartbeat=heartbeat,
            parent_pid=os.getpid(),
            model=model.name,
            path=str(model.path),
            options=options,
        ).command()
    )


def _load_text(path: Path) -> TextSide:
    """On another thread: half of the time goes into imports."""
    with no_garbage():
        # For the event loop's thread, which imports it next and must not wait for that.
        importlib.import_module("twostep.frontend.async_llm")
        from twostep.entrypoints.text_side import load_text_side
        from twostep.models.loader.open import open_checkpoint

        with contextlib.closing(open_checkpoint(path)) as checkpoint:
            text = load_text_side(checkpoint)
        text.tokenizer.serve_threads()
    return text


class ProgressReporter:
    """A ``Reporter`` that passes fractions on; its notes go nowhere."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def note(self, text: str) -> None:
        """Say nothing."""

    @contextlib.contextmanager
    def transfer(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """Fractions of a transfer, as phase "download"."""
        yield lambda done: self._progress("download", min(1.0, done / max(total_bytes, 1)))

    @contextlib.contextmanager
    def count(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        """Fractions of other work, under its own name."""
        yield lambda done: self._progress(label, min(1.0, done / max(total, 1)))
