"""From a path to an engine in this process: the core and its text side."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from twostep.config.model import ModelConfig
from twostep.contracts.pooling import Pooler
from twostep.engine.client import InprocClient
from twostep.entrypoints.boot import BootReport
from twostep.entrypoints.build import Phases, Progress, build_core
from twostep.entrypoints.engine_options import EngineOptions
from twostep.entrypoints.garbage import no_garbage
from twostep.entrypoints.text_side import TextSide, load_text_side
from twostep.entrypoints.tracing.watch import Watch
from twostep.models.loader.open import open_checkpoint
from twostep.ops.cpu.device_model import CpuModel
from twostep.structured_output.compiler import LLGuidanceCompiler


class BuiltEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A running engine core and what its front end needs to know."""

    client: InprocClient
    model: CpuModel
    config: ModelConfig
    text: TextSide
    max_model_len: int
    grammar_compiler: LLGuidanceCompiler
    boot: BootReport
    watch: Watch
    """To be closed after the client."""
    pooler: Pooler | None
    """Set if the engine makes embeddings."""


def build_engine(
    path: Path, options: EngineOptions, progress: Progress | None = None
) -> BuiltEngine:
    """Load the model at ``path``.

    Raises:
        ModelError, OutOfMemoryError: The model can't be loaded; one line with cause and cure.
        UsageError: An option is out of range, or a file cannot be written.
    """
    phases = Phases(progress)
    phases.start("open")
    with (
        no_garbage(),
        contextlib.closing(open_checkpoint(path)) as checkpoint,
        ThreadPoolExecutor(1) as beside,
    ):
        # A tokenizer takes one core as long as the weights take all of them.
        loading = beside.submit(load_text_side, checkpoint)
        built = build_core(checkpoint, path.name, options, phases)
        try:
            text = loading.result()
        except BaseException:
            built.core.shutdown()
            built.watch.close()
            del loading  # it holds the exception, whose traceback holds this frame: a circle
            raise
    return BuiltEngine(
        client=InprocClient(built.core),
        model=built.model,
        config=built.config,
        text=text,
        max_model_len=built.boot.max_model_len,
        grammar_compiler=built.grammar_compiler,
        boot=built.boot,
        watch=built.watch,
        pooler=built.pooler,
    )
