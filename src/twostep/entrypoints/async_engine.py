"""From a model's name to a running AsyncLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from twostep import __version__
from twostep.contracts.engine_info import EngineInfo
from twostep.entrypoints.build import build_engine
from twostep.entrypoints.engine_options import EngineOptions
from twostep.entrypoints.progress import Advance
from twostep.entrypoints.resolve import resolve
from twostep.frontend.async_llm import AsyncLLM
from twostep.frontend.chat_prompt import ChatPrompter
from twostep.frontend.chat_template import ChatTemplate
from twostep.frontend.input_processor import InputProcessor
from twostep.frontend.output_processor import OutputProcessor
from twostep.frontend.thread_client import ThreadClient

Progress = Callable[[str, float], None]
"""Called with (phase, fraction done 0..1)."""


async def start_async_llm(
    model: str | Path,
    options: EngineOptions | None = None,
    *,
    chat_template: str | None = None,
    on_progress: Progress | None = None,
) -> AsyncLLM:
    """Start an engine core for ``model`` and wait until it is ready; the event loop stays free.

    Cancelling it leaves nothing behind. ``on_progress`` is called on the event loop.

    Raises:
        ModelError, OutOfMemoryError, UsageError: One line with cause and cure.
    """
    options = options or EngineOptions()
    loop = asyncio.get_running_loop()

    def progress(phase: str, fraction: float) -> None:
        if on_progress is not None:
            loop.call_soon_threadsafe(on_progress, phase, fraction)

    resolved = await asyncio.to_thread(resolve, model, ProgressReporter(progress))
    engine = await asyncio.to_thread(build_engine, resolved.path, options, progress)
    boot = engine.boot
    info = EngineInfo(
        model=resolved.name,
        model_path=str(resolved.path),
        architecture=boot.architecture,
        quantization=options.quantization,
        weight_bytes=boot.weight_bytes,
        vocab_size=engine.config.vocab_size,
        max_model_len=engine.max_model_len,
        block_size=boot.kv_sizing.block_size,
        num_gpu_blocks=boot.kv_sizing.num_blocks - 1,
        kv_cache_dtype=boot.kv_dtype,
        max_num_seqs=boot.max_num_seqs,
        max_num_batched_tokens=boot.max_num_batched_tokens,
        num_threads=boot.num_threads,
        version=__version__,
        boot=boot.rows(),
    )
    template = None
    if chat_template is not None:
        template = ChatTemplate(chat_template, engine.tokenizer.special.by_name)
    return AsyncLLM(
        ThreadClient(engine.client.engine_core),
        info,
        InputProcessor(
            engine.tokenizer,
            engine.max_model_len,
            engine.config.vocab_size,
            eos_token_id=engine.eos_token_ids[0] if engine.eos_token_ids else None,
            extra_eos_token_ids=engine.eos_token_ids[1:],
            policy=options.scheduling_policy,
        ),
        OutputProcessor(engine.tokenizer),
        ChatPrompter(engine.tokenizer, template),
        engine.tokenizer,
    )


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
