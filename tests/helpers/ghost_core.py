"""An engine core process around a ghost: real process, real sockets, no model.

This is the child's side; ``ghost_llm`` is the parent's. A spec's ``path`` holds a ``Behaviour``.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.engine_info import EngineInfo
from twostep.contracts.errors import ModelFileError
from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.engine.core import EngineCore
from twostep.entrypoints import core_main
from twostep.entrypoints.core_main import LoadedCore
from twostep.entrypoints.core_spec import CoreSpec
from twostep.entrypoints.system_clock import MonotonicClock
from twostep.sim.ghost import GhostExecutor, GhostFuture
from twostep.sim.ghost_model import VOCAB

NUM_BLOCKS = 400
BLOCK_SIZE = 4
MAX_MODEL_LEN = 400


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """What the core does, beside answering."""

    step_seconds: float = 0.0
    """Each step takes so long."""
    load_seconds: float = 0.0
    fail_to_load: bool = False
    hang_on_token: int = -1
    """A step with a prompt that begins with this token never ends."""
    poison_token: int = -1
    """A step with such a prompt fails."""
    die_on_token: int = -1
    """A step with such a prompt kills the process."""
    heartbeat_timeout: float = 10.0
    max_num_seqs: int = 64


class BehavingGhost(GhostExecutor):
    """A ghost with bad manners, if it is told so."""

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(BLOCK_SIZE)
        self._behaviour = behaviour
        self._failure: Exception | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> GhostFuture | None:
        """As ever, unless a token says otherwise."""
        first = {new.prefill_token_ids[0] for new in scheduler_output.scheduled_new_reqs}
        if self._behaviour.die_on_token in first:
            os._exit(7)
        if self._behaviour.hang_on_token in first:
            time.sleep(3600)
        if self._behaviour.poison_token in first:
            raise ValueError("poison")
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> SlowFuture:  # type: ignore[override]
        """As ever, after some time."""
        future = super().sample_tokens(grammar_output)
        return SlowFuture(future, time.monotonic() + self._behaviour.step_seconds)


class SlowFuture:
    """Waits until a moment."""

    def __init__(self, future: GhostFuture, end: float) -> None:
        self._future = future
        self._end = end

    def result(self) -> ModelRunnerOutput:
        """The ghost's result."""
        time.sleep(max(0.0, self._end - time.monotonic()))
        return self._future.result()

    def done(self) -> bool:
        """Whether it is time."""
        return time.monotonic() >= self._end


def make_ghost(spec: CoreSpec, progress: Any) -> LoadedCore:
    """What ``core_main.load_core`` is for real models."""
    behaviour = msgspec.json.decode(spec.path, type=Behaviour)
    for part in range(5):
        progress("weights", part / 4)
        time.sleep(behaviour.load_seconds / 5)
    if behaviour.fail_to_load:
        raise ModelFileError("ghost.gguf: tensor x: is missing; download it again")
    core = EngineCore(
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=512,
            max_num_seqs=behaviour.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
        ),
        cache_config=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        executor=BehavingGhost(behaviour),
        clock=MonotonicClock(),
    )
    info = EngineInfo(
        model=spec.model,
        model_path=spec.path,
        architecture="ghost",
        vocab_size=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_gpu_blocks=NUM_BLOCKS - 1,
        kv_cache_dtype="ghost",
        max_num_seqs=behaviour.max_num_seqs,
        max_num_batched_tokens=512,
        num_threads=1,
        heartbeat_timeout=behaviour.heartbeat_timeout,
        version="0",
    )
    return LoadedCore(core, info, lambda: None)


def main(spec: str) -> int:
    """See ``core_main.main``."""
    return core_main.main([spec], make_ghost)
