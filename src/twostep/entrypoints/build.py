"""From an open checkpoint to an engine core: every part is made here and handed to the next."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import msgspec

from twostep import _native as native
from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.config.model import ModelConfig
from twostep.contracts.errors import OutOfMemoryError, UsageError
from twostep.contracts.pooling import Pooler
from twostep.engine.core import EngineCore
from twostep.entrypoints.boot import BootReport
from twostep.entrypoints.engine_options import EngineOptions
from twostep.entrypoints.grammars import compiler_for_path
from twostep.entrypoints.machine import inspect_machine
from twostep.entrypoints.pooling import PoolingChoice, choose_pooling
from twostep.entrypoints.system_clock import MonotonicClock
from twostep.entrypoints.tracing.watch import Watch
from twostep.executor.uniproc import UniprocExecutor
from twostep.kv_cache.sizing import KVCacheSizing, kv_block_bytes, size_kv_cache
from twostep.models.loader.checkpoint import Checkpoint
from twostep.models.registry import load_model
from twostep.ops.cpu.device_model import CpuModel, DeviceLimits, RecordableModel
from twostep.ops.cpu.weights import CpuWeights
from twostep.runner.model_runner import ModelRunner
from twostep.runner.pooling_runner import PoolingRunner
from twostep.structured_output.compiler import LLGuidanceCompiler

BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 256
"""A step of this many tokens already runs at the kernels' full speed; larger ones only make
everybody else's next token wait longer (measured: docs/log.md, 2026-11-30)."""
CROWD_MULTIPLICATIONS = 5.5e10
"""For each thread, in a step in which newcomers go first: about a quarter of a second. Such steps
may be larger than others, up to ``CROWD_STEPS`` times."""
CROWD_STEPS = 4
DEFAULT_LONGEST_CONTEXT = 32768
KV_SHARE_OF_FREE_MEMORY = 0.5
KV_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
LOGITS_BUFFER_FLOATS = 16 << 20

Progress = Callable[[str, float], None]
"""Called with (phase, fraction done 0..1)."""


class BuiltCore(msgspec.Struct, frozen=True, kw_only=True):
    """An engine core, ready to step."""

    core: EngineCore
    model: CpuModel
    config: ModelConfig
    num_parameters: int
    grammar_compiler: LLGuidanceCompiler
    boot: BootReport
    watch: Watch
    """To be closed after the core."""
    pooler: Pooler | None
    """Set if the engine makes embeddings."""


class Phases:
    """Times the phases of a start and passes progress on."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._phase = ""
        self._started = time.perf_counter()

    def start(self, phase: str) -> None:
        """End the last phase and begin this one."""
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = now - self._started
        self._phase, self._started = phase, now
        self.advance(0.0)

    def advance(self, fraction: float) -> None:
        """How far the current phase is, 0..1."""
        if self._progress is not None:
            self._progress(self._phase, fraction)

    def finish(self) -> None:
        """End the last phase."""
        self.advance(1.0)
        self.seconds[self._phase] = time.perf_counter() - self._started


def build_core(
    checkpoint: Checkpoint, name: str, options: EngineOptions, phases: Phases
) -> BuiltCore:
    """Load the weights of a checkpoint and make an engine core on the CPU, in this process.

    ``name`` is shown in the boot table. ``checkpoint`` may be closed afterwards.

    Raises:
        ModelError, OutOfMemoryError: The model can't be loaded; one line with cause and cure.
        UsageError: An option is out of range, or a file cannot be written.
    """
    watch = Watch(options.trace, options.record)
    try:
        return _build(name, checkpoint, options, phases, watch)
    except BaseException:
        watch.close()
        raise


def _build(
    name: str, checkpoint: Checkpoint, options: EngineOptions, phases: Phases, watch: Watch
) -> BuiltCore:
    config = checkpoint.config
    pooling = choose_pooling(checkpoint, options)
    pooler = None if pooling is None else pooling.pooler
    device = _choose_device()
    num_threads = _choose_threads(options.threads)
    phases.start("weights")
    factory = CpuWeights(device, num_threads)
    model = load_model(
        checkpoint,
        factory,
        precision=options.linear_precision,
        quantization=options.quantization,
        progress=lambda done, total: phases.advance(done / total),
        with_output_layer=pooler is None,
    )
    phases.start("kv cache and plan")
    kv_dtype = _choose_kv_dtype(device, options, config)
    scheduler_config, cache_config, sizing = _size(config, options, kv_dtype, pooling, num_threads)
    cpu_model = _record(
        model, factory, config, device, scheduler_config, sizing, num_threads, kv_dtype, pooler
    )
    compiler = compiler_for_path(checkpoint.path, config.vocab_size)
    core = _start_core(
        cpu_model, config, scheduler_config, cache_config, options, watch, compiler, pooler
    )
    phases.finish()
    boot = BootReport(
        model=name,
        architecture=config.architecture,
        weight_bytes=factory.num_bytes,
        kv_dtype=kv_dtype,
        kv_sizing=sizing,
        # The scheduler counts the place of a vector as a token.
        max_model_len=scheduler_config.max_model_len - (pooler is not None),
        max_num_seqs=scheduler_config.max_num_seqs,
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        crowd_step_tokens=scheduler_config.crowd_step_tokens,
        async_scheduling=scheduler_config.async_scheduling,
        pooling=None if pooling is None else pooling.describe(),
        num_threads=num_threads,
        isa=device.isa,
        isa_reason=device.reason,
        seconds=phases.seconds,
    )
    return BuiltCore(
        core=core,
        model=cpu_model,
        config=config,
        num_parameters=_num_parameters(checkpoint),
        grammar_compiler=compiler,
        boot=boot,
        watch=watch,
        pooler=pooler,
    )


def _num_parameters(checkpoint: Checkpoint) -> int:
    return sum(math.prod(checkpoint.tensor(name).shape) for name in checkpoint.names)


def _choose_device() -> native.Device:
    try:
        return native.make_device(os.environ.get("TWOSTEP_CPU_ISA", ""))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _choose_kv_dtype(device: native.Device, options: EngineOptions, config: ModelConfig) -> str:
    """What the kernels read fastest; for the exact path what keeps most bits in two bytes.

    An encoder reads its KV once, in the step that wrote it: there is nothing to save.
    """
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    if config.is_encoder:
        return "fp32"
    if options.linear_precision == "bf16":
        return "fp16"
    default: str = native.default_kv_dtype(device)
    return default


def _choose_threads(asked: int | None) -> int:
    usable = inspect_machine().usable_cpus
    if asked is None:
        return usable
    if not 1 <= asked <= 4 * usable:
        raise UsageError(f"--threads {asked}: must be 1 to {4 * usable}; {usable} cores are usable")
    return asked


def _size(
    config: ModelConfig,
    options: EngineOptions,
    kv_dtype: str,
    pooling: PoolingChoice | None,
    num_threads: int,
) -> tuple[SchedulerConfig, CacheConfig, KVCacheSizing]:
    """Budgets, context length and KV blocks: what is asked, within what is free.

    A vector takes the place of one token behind its text. Encoders see a text in one step, whole;
    neither they nor a mean can leave out what others have computed.
    """
    is_encoder = pooling is not None and pooling.is_encoder
    takes_all = is_encoder or (pooling is not None and pooling.pooler.kind == "mean")
    is_chunked = options.enable_chunked_prefill and not is_encoder
    max_num_seqs = options.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    budget = options.max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
    longest = min(config.max_position, DEFAULT_LONGEST_CONTEXT)
    if pooling is not None:
        longest = min(longest, pooling.max_length or longest)
    max_model_len = options.max_model_len or longest
    if max_model_len > config.max_position:
        raise UsageError(
            f"--max-model-len {max_model_len}: the model was trained for {config.max_position} "
            "tokens; ask for that or less"
        )
    max_model_len += pooling is not None
    if not is_chunked:
        budget = max(budget, max_model_len)
    block_bytes = kv_block_bytes(
        block_size=BLOCK_SIZE,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype_bytes=KV_DTYPE_BYTES[kv_dtype],
    )
    free = inspect_machine().available_memory
    if free is None:
        raise OutOfMemoryError(
            "the system does not say how much memory is free; set --kv-cache-memory-bytes"
        )
    asked = options.kv_cache_memory_bytes
    usable = free if asked is not None else int(free * KV_SHARE_OF_FREE_MEMORY)
    if options.max_model_len is None:  # the default gives way to what fits
        fitting = (usable if asked is None else asked) // block_bytes - 1
        room = fitting * BLOCK_SIZE - (pooling is not None)
        max_model_len = max(min(max_model_len, room), BLOCK_SIZE)
    steps = 2 if options.async_scheduling else 1
    has_crowds = options.prefill_burst_tokens > 0 and options.scheduling_policy == "fcfs"
    crowd_step = 0
    if has_crowds and options.max_num_batched_tokens is None and pooling is None:
        crowd_step = min(CROWD_STEPS * budget, crowd_step_tokens(config, num_threads))
    if pooling is not None:
        _require_room(max_model_len - 1, usable if asked is None else asked, block_bytes)
    sizing = size_kv_cache(
        block_bytes=block_bytes,
        block_size=BLOCK_SIZE,
        available_bytes=usable,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        requested_bytes=asked,
        sliding_window=common_window(config),
        max_in_flight_tokens=steps * max(budget, crowd_step),
    )
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        policy=options.scheduling_policy,
        async_scheduling=options.async_scheduling,
        enable_chunked_prefill=is_chunked,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        prefill_burst_tokens=options.prefill_burst_tokens,
        crowd_step_tokens=crowd_step if crowd_step > budget else 0,
    )
    cache_config = CacheConfig(
        num_blocks=sizing.num_blocks,
        block_size=sizing.block_size,
        enable_prefix_caching=options.enable_prefix_caching and not takes_all,
        watermark=options.watermark,
        sliding_window=common_window(config),
    )
    return scheduler_config, cache_config, sizing


def crowd_step_tokens(config: ModelConfig, num_threads: int) -> int:
    """Tokens that so many threads multiply with a model's layers in a quarter of a second or so."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    experts = config.num_experts_per_token * config.moe_intermediate_size
    mlp = 3 * max(config.intermediate_size, experts)
    per_token = config.num_layers * config.hidden_size * (attention + mlp)
    return int(CROWD_MULTIPLICATIONS * num_threads / per_token)


def _require_room(length: int, num_bytes: int, block_bytes: int) -> None:
    """Of a text that is embedded: the place of its vector must be there as well."""
    num_blocks = num_bytes // block_bytes
    longest = (num_blocks - 1) * BLOCK_SIZE - 1
    if longest < length:
        cure = f"set --max-model-len {longest} or less" if longest > 0 else "free some memory"
        raise OutOfMemoryError(
            f"the KV cache has {num_bytes} bytes, {num_blocks} blocks of {BLOCK_SIZE} tokens, too "
            f"few for a text of {length} tokens: {cure}"
        )


def common_window(config: ModelConfig) -> int | None:
    """The sliding window, if every layer has the same."""
    windows = {layer.sliding_window for layer in config.layers}
    return windows.pop() if len(windows) == 1 else None


def _record(
    model: RecordableModel,
    weights: CpuWeights,
    config: ModelConfig,
    device: native.Device,
    scheduler_config: SchedulerConfig,
    sizing: KVCacheSizing,
    num_threads: int,
    kv_dtype: str,
    pooler: Pooler | None,
) -> CpuModel:
    max_logits_rows = max(8, min(64, LOGITS_BUFFER_FLOATS // config.vocab_size))
    limits = DeviceLimits(
        max_num_seqs=scheduler_config.max_num_seqs,
        max_num_batched_tokens=scheduler_config.largest_step,
        max_model_len=scheduler_config.max_model_len,
        num_blocks=sizing.num_blocks,
        block_size=sizing.block_size,
        max_logits_rows=max_logits_rows if pooler is None else scheduler_config.max_num_seqs,
    )
    return CpuModel(
        model,
        config,
        device,
        limits,
        weights=weights,
        num_threads=num_threads,
        kv_cache_dtype=kv_dtype,
        pooling=None if pooler is None else pooler.kind,
    )


def _start_core(
    cpu_model: CpuModel,
    config: ModelConfig,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    options: EngineOptions,
    watch: Watch,
    compiler: LLGuidanceCompiler,
    pooler: Pooler | None,
) -> EngineCore:
    eager = options.enforce_eager
    if pooler is None:
        runner = ModelRunner(cpu_model, config.vocab_size, enforce_eager=eager)
    else:
        runner = PoolingRunner(cpu_model, config.vocab_size, pooler.kind, enforce_eager=eager)
    executor = UniprocExecutor(runner, max_concurrent_batches=2 if options.async_scheduling else 1)
    clock = MonotonicClock()
    observer = watch.begin(executor, clock, scheduler_config, cache_config)
    return EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=executor,
        clock=clock,
        grammar_compiler=watch.grammars(compiler),
        observer=observer,
    )
