"""A model recorded on the CPU: what the runner launches, step after step."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twostep import _native as native
from twostep.config.model import ModelConfig, RopeConfig
from twostep.contracts.sampling import SamplingParams
from twostep.ops.cpu.recorder import Buffers, CpuOps
from twostep.ops.reference.rope import rope_tables

Int32Array = NDArray[np.int32]

SAMPLE, SCORE = 0, 1
"""Kinds of logits rows: draw a token, or score the known next token of the prompt."""


class RecordableModel(Protocol):
    """What a model class offers: two halves of one pass, since only some rows get logits."""

    def forward(self, ops: Any, batch: Any) -> Any:
        """Hidden states [T, H] of the flat batch."""
        ...

    def compute_logits(self, ops: Any, hidden: Any, batch: Any) -> Any:
        """Logits [S, V] of the rows that need them."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLimits:
    """Sizes of the static buffers."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_logits_rows: int
    """Rows of one logits buffer; more are computed slice after slice."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogitsRows:
    """Which rows of the flat batch get logits, and what for."""

    indices: Int32Array
    """[S] flat token index."""
    requests: Int32Array
    """[S] request (batch row) of each."""
    kinds: Int32Array
    """[S] SAMPLE or SCORE."""
    num_logprobs: Int32Array
    """[S] how many top log-probabilities are wanted; -1 = none at all."""


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

    def tokens(self) -> list[int]:
        """[S] the drawn token, or the scored prompt token."""
        return [token for part in self._slices for token in part.tokens()]

    def failed(self) -> list[int]:
        """[S] 1 where the logits held NaN or Inf, or nothing was left to draw."""
        return [flag for part in self._slices for flag in part.failed()]

    def logprobs(self, index: int) -> tuple[list[int], list[float], int]:
        """Ids, log-probabilities (chosen first, then the top n) and rank of row ``index``."""
        for part in self._slices:
            if index < part.num_rows:
                ids, values, rank = part.logprobs(index)
                return ids, values, rank
            index -= part.num_rows
        raise IndexError("no such logits row")


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
        num_threads: int,
        kv_cache_dtype: str,
    ) -> None:
        self.limits = limits
        self._device = device
        self._config = config
        self._ropes: dict[RopeConfig, Any] = {}
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
        self.sample_state = native.SampleState(
            limits.max_num_seqs, config.vocab_size, num_threads
        )
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
        hidden = model.forward(ops, None)
        ops.keep(hidden)
        self.forward_plan = ops.finish()

        ops = new_ops()
        logits = model.compute_logits(ops, hidden, None)
        ops.keep(logits)
        ops.sample(logits, self.sample_state)
        self.sample_plan = ops.finish()
        self.logits_rows = logits.rows

    def _rope_table(self, rope: RopeConfig) -> Any:
        if rope not in self._ropes:
            cos, sin = rope_tables(rope, self.limits.max_model_len + 1)
            self._ropes[rope] = native.RopeTable(cos, sin)
        return self._ropes[rope]

    def make_step(
        self,
        num_tokens: int,
        query_start_loc: Int32Array,
        seq_lens: Int32Array,
        rows: Int32Array,
        block_table: Int32Array,
        logits: LogitsRows,
        part: slice,
    ) -> Any:
        """Copy this step's metadata to the device's side; the numpy arrays are free again.

        Args:
            num_tokens: T.
            query_start_loc: int32 [requests + 1], where each request starts in the flat batch.
            seq_lens: int32 [requests], computed and scheduled tokens together.
            rows: int32 [requests], permanent row of each.
            block_table: int32 [max_num_seqs, max_blocks], physical block ids.
            logits: Rows that get logits.
            part: Which of them this step is for (at most ``max_logits_rows``).
        """
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
        native.SampleStep(step, logits.kinds[part], logits.num_logprobs[part])
        return step

    def drain(self) -> None:
        """Wait until nothing runs. A failed op is no longer anybody's concern."""
        with contextlib.suppress(RuntimeError):
            self.stream.wait(self.stream.last_ticket)

    def stage_row(
        self,
        step: Any,
        row: int,
        token_ids: Int32Array,
        prompt_len: int,
        params: SamplingParams,
        stop_token_ids: list[int],
    ) -> None:
        """Give ``row`` to a request, in stream order: its known tokens and sampling parameters."""
        step.stage_tokens(self.token_table, row, 0, token_ids)
        self.sample_state.stage(
            step,
            row,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias or {},
            allowed_token_ids=params.allowed_token_ids or [],
            bad_words=params.bad_words_token_ids or [],
            stop_token_ids=stop_token_ids,
            min_tokens=params.min_tokens,
            seed=(params.seed or 0) & 0xFFFFFFFFFFFFFFFF,
            prompt_len=prompt_len,
            token_ids=token_ids,
        )
