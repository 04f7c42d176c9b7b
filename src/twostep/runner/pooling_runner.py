"""Turns a plan into launches for a model that makes embeddings: a vector instead of a token."""

from __future__ import annotations

from typing import Any

from twostep.contracts.executor import StepFuture
from twostep.contracts.plan import GrammarOutput, NewRequestData
from twostep.contracts.pooling import PoolingType
from twostep.ops.cpu.device_model import SAMPLE, CpuModel, LogitsRows, SampledRows
from twostep.runner.input_batch import InputBatch
from twostep.runner.model_runner import ModelRunner
from twostep.runner.pooled_output import PooledOutput


class PoolingRunner(ModelRunner):
    """A ``ModelRunner`` whose requests end with their prompt, and whose result is its vector.

    All logits rows of a step fit into one slice: there is one for each request at most.
    """

    def __init__(
        self,
        model: CpuModel,
        vocab_size: int,
        pooling: PoolingType,
        *,
        enforce_eager: bool = False,
    ) -> None:
        """``enforce_eager``: launch the forward pass op by op."""
        assert model.limits.max_logits_rows >= model.limits.max_num_seqs
        super().__init__(model, vocab_size, enforce_eager=enforce_eager)
        self._pooling = pooling

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Launch pooling for the forward pass just launched."""
        state = self._take_launched()
        [(step, pooled)] = state.steps
        ticket = self._launch(self._model.pool_plan, step)
        req_ids = state.batch.req_ids
        timing = None
        if self._times_device:
            timing = self._timing_of(state, [ticket])
        return PooledOutput(
            state.plan_order,
            SampledRows(self._model.stream, ticket, []),
            [req_ids[request] for request in state.logits.requests],
            pooled,
            timing,
        )

    def _select_logits_rows(self, batch: InputBatch) -> LogitsRows:
        """The row that is pooled of each request that has all of its prompt now."""
        starts, ends = batch.query_start_loc[:-1], batch.query_start_loc[1:]
        requests = [request for request, count in enumerate(batch.num_sampled) if count]
        first = self._pooling == "cls"
        indices = [starts[request] if first else ends[request] - 1 for request in requests]
        return LogitsRows(indices=indices, requests=requests, kinds=[SAMPLE] * len(requests))

    def _stage_params(self, new: NewRequestData, row: int, step: Any) -> None:
        """Nothing is sampled."""
