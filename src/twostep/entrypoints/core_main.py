"""The engine core's process: ``python -m twostep.entrypoints.core_main SPEC``.

Started by ``start_async_llm``. It ends when told to, when its parent has died, or when its core
has; it ignores the signals of a terminal, because what they mean is the parent's to decide.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from twostep import __version__
from twostep.contracts.engine_info import EngineInfo
from twostep.contracts.errors import EngineDeadError, TwostepError
from twostep.engine.core import EngineCore
from twostep.engine.core_channel import SocketCoreChannel
from twostep.engine.core_proc import EngineCoreProc
from twostep.engine.frames import FrameSocket
from twostep.engine.heartbeat import Heartbeat
from twostep.engine.wire import LastWords, LoadProgress, Ready
from twostep.entrypoints.core_spec import CoreSpec
from twostep.entrypoints.garbage import no_garbage
from twostep.entrypoints.system_clock import MonotonicClock

if TYPE_CHECKING:
    from twostep.entrypoints.build import BuiltCore

PR_SET_PDEATHSIG = 1
LAST_NEWS_SECONDS = 2.0
"""How long an ending core waits for its last news to be read."""
HEARTBEAT_TIMEOUT_SECONDS = 10.0
SLOWEST_FLOPS_PER_THREAD = 5e9
"""A machine that computes more slowly may be called hung while it is not."""


class LoadedCore(msgspec.Struct, frozen=True):
    """What is served."""

    core: EngineCore
    info: EngineInfo
    close: Callable[[], None]
    """Called at the very end."""


MakeCore = Callable[[CoreSpec, Callable[[str, float], None]], LoadedCore]
"""Loads what a spec says; told a callback (phase, fraction)."""


def main(argv: list[str], make_core: MakeCore | None = None) -> int:
    """Run a core; returns the exit code: 0 if it was told to end, 1 if it failed.

    ``make_core`` makes something else than the real engine.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    spec = msgspec.json.decode(argv[0], type=CoreSpec)
    os.set_inheritable(spec.wire, False)
    die_with_parent(spec.parent_pid)
    faulthandler.enable()
    with contextlib.closing(FrameSocket(socket.socket(fileno=spec.wire))) as wire:
        channel = SocketCoreChannel(wire)
        try:
            serve(spec, channel, make_core or load_core)
        except TwostepError as error:
            _leave_words(channel, error)
            return 1
        except BaseException as error:
            _leave_words(channel, EngineDeadError(f"the engine core failed: {_words(error)}"))
            raise
        _flush(channel)
    return 0


def serve(spec: CoreSpec, channel: SocketCoreChannel, make_core: MakeCore) -> None:
    """Load the model and serve it until told to end.

    Raises:
        ModelError, OutOfMemoryError, UsageError: The model can't be loaded.
        EngineDeadError: The core has stopped by itself.
    """
    heartbeat = Heartbeat(spec.heartbeat)
    os.close(spec.heartbeat)
    loaded = make_core(spec, lambda phase, part: channel.send(LoadProgress(phase, part)))
    try:
        proc = EngineCoreProc(
            loaded.core,
            channel,
            heartbeat,
            MonotonicClock(),
            vocab_size=loaded.info.vocab_size,
        )
        channel.send(Ready(loaded.info))
        proc.run()
    finally:
        loaded.close()


def load_core(spec: CoreSpec, progress: Callable[[str, float], None]) -> LoadedCore:
    """The real engine."""
    with no_garbage():
        # Heavy: progress is told before.
        from twostep import _native as native
        from twostep.entrypoints.build import Phases, build_core
        from twostep.models.loader.open import open_checkpoint

        phases = Phases(progress)
        phases.start("open")
        with contextlib.closing(open_checkpoint(Path(spec.path))) as checkpoint:
            built = build_core(checkpoint, spec.model, spec.options, phases)
    # This thread will run the loop, which computes while it waits: it must not keep a core from
    # the API process, which brings its news to the client.
    native.take_long_slices()

    def close() -> None:
        built.grammar_compiler.close()
        built.watch.close()
        for line in built.watch.lines():
            print(line, file=sys.stderr, flush=True)

    return LoadedCore(built.core, engine_info(spec, built), close)


def engine_info(spec: CoreSpec, built: BuiltCore) -> EngineInfo:
    """What the front end is told of the engine."""
    boot = built.boot
    return EngineInfo(
        model=spec.model,
        model_path=spec.path,
        architecture=boot.architecture,
        quantization=spec.options.quantization,
        num_parameters=built.num_parameters,
        weight_bytes=boot.weight_bytes,
        vocab_size=built.config.vocab_size,
        max_model_len=boot.max_model_len,
        block_size=boot.kv_sizing.block_size,
        num_gpu_blocks=boot.kv_sizing.num_blocks - 1,
        kv_cache_dtype=boot.kv_dtype,
        enable_prefix_caching=built.core.scheduler.kv_cache_manager.enable_prefix_caching,
        max_num_seqs=boot.max_num_seqs,
        max_num_batched_tokens=boot.max_num_batched_tokens,
        num_threads=boot.num_threads,
        heartbeat_timeout=heartbeat_timeout(built),
        version=__version__,
        pooler=built.pooler,
        boot=boot.rows(),
    )


def heartbeat_timeout(built: BuiltCore) -> float:
    """Seconds: two full steps in flight on a very slow machine, and some more."""
    flops = 2 * built.num_parameters * 2 * built.boot.largest_step
    return HEARTBEAT_TIMEOUT_SECONDS + flops / (SLOWEST_FLOPS_PER_THREAD * built.boot.num_threads)


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent dies, at once and whatever runs then, where the system can.

    (The input thread, which reads the end of file, is the second way.)
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before that
        os._exit(1)


def _leave_words(channel: SocketCoreChannel, error: TwostepError) -> None:
    channel.send(LastWords(type(error).__name__, str(error)))
    _flush(channel)


def _flush(channel: SocketCoreChannel) -> None:
    """Give the reader some time for the last news."""
    end = time.monotonic() + LAST_NEWS_SECONDS
    while not channel.flush() and time.monotonic() < end:
        time.sleep(0.01)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}; the log has the details"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
