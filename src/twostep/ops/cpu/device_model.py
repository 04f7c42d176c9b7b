"""A model recorded on the CPU: what the runner launches, step after step."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostep import _native as native
from twostep.config.model import ModelConfig, RopeConfig
from twostep.contracts.pooling import PoolingType
from twostep.ops.cpu.recorder import Buffers, CpuOps
from twostep.ops.cpu.weights import CpuWeights
from twostep.ops.protocol import Carried
from twostep.ops.reference.rope import rope_tables

Int32Array = NDArray[np.int32]

SAMPLE, SCORE = native.SampleStep.SAMPLE, native.SampleStep.SCORE
"""Kinds of logits rows: draw a token, or score the known next token of the prompt."""


class RecordableModel(Protocol):
    """What a model class offers: two halves of one pass, since only some rows get logits."""

    def forward(self, ops: Any, batch: Any) -> Carried:
        """What is computed for every token of the flat batch."""
        ...

    def final_states(self, ops: Any, carried: Carried, batch: Any, *, sampled: bool) -> Any:
        """Hidden states [S, H] or [T, H] as the output layer, or pooling, reads them."""
        ...

    def compute_logits(self, ops: Any, carried: Carried, batch: Any) -> Any:
        """Logits [S, V] of the rows that need them."""
        ...


class DeviceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the static buffers."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_logits_rows: int
    """Rows of one logits buffer; more are computed slice after slice."""


class LogitsRows(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows of the flat batch get logits, and what for."""

    indices: list[int]
    """[S] flat token index."""
    requests: list[int]
    """[S] request (batch row) of each."""
    kinds: list[int]
    """[S] SAMPLE or SCORE."""


class SampledRows:
    """Results of the logits rows of one step; valid once the launch is done."""

    def __init__(self, stream: Any, ticket: int, slices: list[Any]) -> None:
        self._stream = stream
        self._ticket = ticket
        self._slices = slices

    def wait(self) -> None:
        """Take part in the work until this step is complete. Raises RuntimeError of a failed op."""
        self._stream.wait(self._ticket)

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return bool(self._stream.done(self._ticket))

    def spans(self, names: dict[int, str]) -> list[tuple[str, float, float]]:
        """(name, start, end) of the launches with these tickets, in seconds of ``time.monotonic``.

        To be asked once, after ``wait``, of a stream that times its launches.
        """
        found = self._stream.take_spans(min(names), max(names))
        return [(names[ticket], start, end) for ticket, start, end in found if ticket in names]

    def tokens(self) -> list[int]:
        """[S] the drawn token; -1 where none was drawn."""
        if len(self._slices) == 1:
            tokens: list[int] = self._slices[0].tokens()
            return tokens
        return [token for part in self._slices for token in part.tokens()]

    def failed(self, slice_rows: int) -> list[tuple[int, str]]:
        """(row, why) of rows that could not be sampled; ``slice_rows`` is the slices' height."""
        return [
            (number * slice_rows + row, why)
            for number, part in enumerate(self._slices)
            for row, why in part.failed()
        ]

    def logprobs(
        self, row: int, slice_rows: int
    ) -> tuple[Int32Array, NDArray[np.float32], int] | None:
        """Ids and log-probabilities (the row's own token, then the best n) and its rank."""
        part = self._slices[row // slice_rows]
        result: tuple[Int32Array, NDArray[np.float32], int] | None = part.logprobs(row % slice_rows)
        return result


class CpuModel:
    """Plans, buffers, KV cache and sampler state of one model on the CPU.

    Everything here is launched on one stream and runs in order; nothing waits.
    """

    def __init__(
        self,
        model: RecordableModel,
        config: ModelConfig,
        device: Any,
        limits: DeviceLimits,
        *,
        weights: CpuWeights,
        num_threads: int,
        kv_cache_dtype: str,
        pooling: PoolingType | None = None,
    ) -> None:
        """``weights`` packed the model's weights.

        ``pooling``: the model makes vectors of texts, and neither logits nor tokens.
        """
        self.limits = limits
        self._pools = pooling is not None
        self._device = device
        self._config = config
        self._ropes: dict[RopeConfig | None, Any] = {}
        self.stream = native.Stream(num_threads)
        self.token_table = native.TokenTable(limits.max_num_seqs, limits.max_model_len + 1)
        self.kv_cache = native.KVCache(
            device,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            limits.num_blocks,
            limits.block_size,
            kv_cache_dtype,
        )
        self.stream.tend_when_idle(self.kv_cache, weights.arena)
        buffers = Buffers(limits.max_num_batched_tokens, limits.max_logits_rows)

        def new_ops() -> CpuOps:
            return CpuOps(
                device,
                buffers,
                token_table=self.token_table,
                kv_cache=self.kv_cache,
                rope_tables=self._rope_table,
                num_threads=num_threads,
            )

        ops = new_ops()
        ops.apply_staged()
        carried = model.forward(ops, None)
        for value in carried:
            ops.keep(value)
        self.forward_plan = ops.finish()
        if pooling is not None:
            self.pool_plan = self._record_pooling(model, new_ops(), carried, pooling)
            return
        self.sample_state = native.SampleState(limits.max_num_seqs, config.vocab_size, num_threads)

        ops = new_ops()
        logits = model.compute_logits(ops, carried, None)
        ops.keep(logits)
        self.logits_plan = ops.finish()
        self.logits_rows = logits.rows

        ops = new_ops()
        ops.sample(logits, self.sample_state)
        self.sample_plan = ops.finish()

    def _record_pooling(
        self, model: RecordableModel, ops: CpuOps, carried: Carried, pooling: PoolingType
    ) -> Any:
        is_mean = pooling == "mean"
        rows = model.final_states(ops, carried, None, sampled=not is_mean)
        if is_mean:
            sums = native.Rows(self._config.hidden_size, self.limits.max_num_seqs)
            ops.pool_mean(rows, sums)
        else:
            ops.pool_rows(rows)
        return ops.finish()

    def _rope_table(self, rope: RopeConfig | None) -> Any:
        if rope not in self._ropes:
            length = self.limits.max_model_len + 1
            if rope is None:  # by no angle
                cos, sin = np.ones((length, 1), np.float32), np.zeros((length, 1), np.float32)
            else:
                cos, sin = rope_tables(rope, length)
            self._ropes[rope] = native.RopeTable(cos, sin)
        return self._ropes[rope]

    def view_block_table(self, block_table: Int32Array) -> Any:
        """A block table as ``make_step`` takes it in many steps; the array may change."""
        return native.BlockTableView(block_table)

    def make_step(
        self,
        num_tokens: int,
        query_start_loc: list[int],
        seq_lens: list[int],
        rows: list[int],
        block_table: Any,
        logits: LogitsRows,
        part: slice,
    ) -> tuple[Any, Any]:
        """Copy this step's metadata to the device's side; the block table is free again.

        Args:
            num_tokens: T.
            query_start_loc: [requests + 1], where each request starts in the flat batch.
            seq_lens: [requests], computed and scheduled tokens together.
            rows: [requests], permanent row of each.
            block_table: int32 [max_num_seqs, max_blocks], physical block ids: an array, or what
                ``view_block_table`` made of it.
            logits: Rows that get logits.
            part: Which of them this step is for (at most ``max_logits_rows``).

        Returns:
            The native step, and its part that sampling (or pooling) reads and writes.
        """
        kinds = logits.kinds[part]
        step = native.make_step(
            self._device,
            num_tokens,
            query_start_loc,
            seq_lens,
            rows,
            logits.indices[part],
            logits.requests[part],
            block_table,
            self.limits.block_size,
        )
        if self._pools:
            return step, native.PooledStep(step, self._config.hidden_size)
        if SCORE not in kinds:
            return step, native.SampleStep(step)
        return step, native.SampleStep(step, np.array(kinds, dtype=np.uint8))

    def forward_ops(self) -> list[Any]:
        """The forward plan op by op, a plan for each."""
        plan = self.forward_plan
        return [plan.slice(index, index + 1) for index in range(len(plan))]

    def forward_pieces(self) -> list[Any]:
        """The forward plan cut at attention: pieces without it, and each attention on its own."""
        plan = self.forward_plan
        is_attention = [name.startswith("attention") for name in plan.op_names()]
        cuts = [i for i in range(1, len(plan)) if is_attention[i] != is_attention[i - 1]]
        ends = [*cuts, len(plan)]
        return [plan.slice(first, last) for first, last in zip([0, *cuts], ends, strict=True)]

    def drain(self) -> None:
        """Wait until nothing runs. A failed op is no longer anybody's concern."""
        with contextlib.suppress(RuntimeError):
            self.stream.wait(self.stream.last_ticket)
