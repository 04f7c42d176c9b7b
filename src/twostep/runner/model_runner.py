"""Turns a plan into launches: states, flat batch, forward pass, sampling (stops 5, 6, 7 and 9)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import msgspec
import numpy as np

from twostep.contracts.executor import StepFuture
from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, NewRequestData, SchedulerOutput
from twostep.ops.cpu.device_model import SAMPLE, SCORE, CpuModel, LogitsRows, SampledRows
from twostep.runner.async_output import AsyncOutput, CompletedOutput, LaunchTiming
from twostep.runner.graphs import BatchDescriptor, GraphDispatcher, GraphMode
from twostep.runner.input_batch import InputBatch, build_input_batch, continue_decodes
from twostep.runner.request_states import RequestStates
from twostep.sampler.row_params import row_params, stage_row

logger = logging.getLogger(__name__)


class ExecuteModelState(msgspec.Struct, frozen=True):
    """A forward pass that was launched and waits for ``sample_tokens``."""

    batch: InputBatch
    plan_order: list[str]
    logits: LogitsRows
    steps: list[tuple[Any, Any]]
    """(device step, its sampling part), one for each slice of logits rows; the first step also
    ran the forward pass."""
    tickets: list[int]
    """Of the forward pass."""
    graph_mode: GraphMode


class ModelRunner:
    """Owns the rows of running requests. Nothing here waits for the device."""

    def __init__(self, model: CpuModel, vocab_size: int, *, enforce_eager: bool = False) -> None:
        """``enforce_eager``: launch the forward pass op by op."""
        self._model = model
        self._vocab_size = vocab_size
        limits = model.limits
        max_blocks = -(-limits.max_model_len // limits.block_size) + 1
        self.states = RequestStates(limits.max_num_seqs, max_blocks)
        self._block_table = model.view_block_table(self.states.block_table)
        # A recorded plan is replayed with any number of tokens: nothing to capture or to pad.
        self.graphs = GraphDispatcher(
            GraphMode.FULL,
            capture_sizes=None,
            max_num_seqs=limits.max_num_seqs,
            enforce_eager=enforce_eager,
        )
        self._forward_plans: dict[GraphMode, list[Any]] = {GraphMode.FULL: [model.forward_plan]}
        self.last_batch: InputBatch | None = None
        self.last_logits_rows: LogitsRows | None = None
        self.last_graph: BatchDescriptor | None = None
        """What the newest launch was made of; for those who watch, the runner is done with it."""
        self._only_decodes = False
        """Whether the newest launch was one token, sampled, of each of its requests."""
        self._execute_model_state: ExecuteModelState | None = None
        self._abandoned: SampledRows | None = None
        """A forward pass that nobody will sample, and that may still run."""
        self._times_device = False

    def time_device(self, wanted: bool = True) -> None:
        """From now on results say when their launches ran, or no longer do."""
        self._model.stream.set_timing(wanted)
        self._times_device = wanted

    def execute_model(self, plan: SchedulerOutput) -> CompletedOutput | None:
        """Apply the plan to the rows and launch the forward pass.

        Returns None (``sample_tokens`` must follow), or an empty result for a plan of 0 tokens.
        """
        if self._execute_model_state is not None:
            raise RuntimeError("execute_model called twice without sample_tokens")
        if self._abandoned is not None:
            self._wait_for_abandoned()
        self._update_states(plan)
        if plan.total_num_scheduled_tokens == 0:
            return CompletedOutput(ModelRunnerOutput(req_ids=[], sampled_token_ids=[]))
        batch, logits = self._prepare_inputs(plan)
        steps = self._make_steps(batch, logits)
        if plan.scheduled_new_reqs:
            self._stage_new_requests(plan.scheduled_new_reqs, batch, steps[0][0])
        graph = self.graphs.dispatch(
            batch.num_tokens,
            len(batch.req_ids),
            max_query_len=batch.max_query_len,
            min_num_computed=batch.min_num_computed,
        )
        self.last_batch, self.last_logits_rows, self.last_graph = batch, logits, graph
        tickets = [self._launch(part, steps[0][0]) for part in self._plans_of(graph.mode)]
        self._execute_model_state = ExecuteModelState(
            batch, list(plan.num_scheduled_tokens), logits, steps, tickets, graph.mode
        )
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Launch logits and sampling for the forward pass just launched."""
        state = self._take_launched()
        req_ids, logits = state.batch.req_ids, state.logits
        owners = [req_ids[request] for request in logits.requests]
        if grammar_output is not None:
            self._set_bitmasks(state, owners, logits.kinds, grammar_output)
        tickets: list[int] = []
        for step, _ in state.steps:
            tickets.append(self._launch(self._model.logits_plan, step))
            tickets.append(self._launch(self._model.sample_plan, step))
        return AsyncOutput(
            state.plan_order,
            SampledRows(self._model.stream, tickets[-1], [part for _, part in state.steps]),
            owners,
            logits.kinds,
            with_logprobs=bool(self.states.wanting_logprobs),
            slice_rows=self._model.limits.max_logits_rows,
            timing=self._timing_of(state, tickets) if self._times_device else None,
        )

    def _take_launched(self) -> ExecuteModelState:
        """The forward pass that was launched last."""
        state, self._execute_model_state = self._execute_model_state, None
        if state is None:
            raise RuntimeError("sample_tokens called without execute_model")
        return state

    def _launch(self, plan: Any, step: Any) -> int:
        """Queue a recorded plan on the device; returns the ticket to wait for."""
        ticket: int = self._model.stream.launch(plan, step)
        return ticket

    def _timing_of(self, state: ExecuteModelState, tickets: list[int]) -> LaunchTiming:
        names = dict.fromkeys(state.tickets, "forward")
        names.update(zip(tickets, cycle(("logits", "sample")), strict=False))
        return LaunchTiming(names, state.graph_mode.value)

    def _set_bitmasks(
        self,
        state: ExecuteModelState,
        owners: list[str],
        kinds: list[int],
        grammar_output: GrammarOutput,
    ) -> None:
        """Hand each structured request's mask to the logits row that samples for it."""
        height = self._model.limits.max_logits_rows
        words = np.frombuffer(grammar_output.bitmask, dtype=np.int32)
        words = words.reshape(len(grammar_output.request_ids), -1)
        row_of = {owner: row for row, owner in enumerate(owners) if kinds[row] == SAMPLE}
        rows = np.array([row_of[request_id] for request_id in grammar_output.request_ids])
        for number, (_, part) in enumerate(state.steps):
            mine = rows // height == number
            if mine.any():
                part.set_bitmask((rows[mine] % height).astype(np.int32), words[mine])

    def reset_after_failure(self) -> None:
        """Forget a launched forward pass that will not be sampled.

        It is not waited for here: the step in front may have an error that has not been told.
        """
        state, self._execute_model_state = self._execute_model_state, None
        if state is not None:
            self._abandoned = SampledRows(self._model.stream, state.tickets[-1], [])

    def _wait_for_abandoned(self) -> None:
        """Should it have failed, that is nobody's error."""
        assert self._abandoned is not None
        try:
            self._abandoned.wait()
        except RuntimeError as error:
            logger.debug("a forward pass that was given up failed: %s", error)
        self._abandoned = None

    def shutdown(self) -> None:
        """Wait for what runs and forget every request."""
        self._execute_model_state = None
        self._model.drain()

    def _plans_of(self, mode: GraphMode) -> list[Any]:
        """What is launched for a forward pass; cut when it is first asked for."""
        if mode not in self._forward_plans:
            is_eager = mode is GraphMode.NONE
            self._forward_plans[mode] = (
                self._model.forward_ops() if is_eager else self._model.forward_pieces()
            )
        return self._forward_plans[mode]

    def _update_states(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids:
            self.states.drop(request_id)
        for request_id in plan.preempted_req_ids:
            self.states.drop(request_id)
        for new in plan.scheduled_new_reqs:
            self.states.drop(new.request_id)
            self.states.add(new)
        cached = plan.scheduled_cached_reqs
        if any(cached.new_block_ids):
            for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if block_ids:
                    self.states.append_blocks(self.states[request_id], block_ids)

    def _prepare_inputs(self, plan: SchedulerOutput) -> tuple[InputBatch, LogitsRows]:
        """The flat batch, and its rows that get logits."""
        if self._goes_on_decoding(plan):
            assert self.last_batch is not None
            assert self.last_logits_rows is not None
            num_computed = plan.scheduled_cached_reqs.num_computed_tokens
            return continue_decodes(self.last_batch, num_computed), self.last_logits_rows
        batch = self._pack(plan)
        self._only_decodes = batch.max_query_len == 1 and all(batch.num_sampled)
        return batch, self._select_logits_rows(batch)

    def _goes_on_decoding(self, plan: SchedulerOutput) -> bool:
        """Whether the requests of the last step decode one more token each, and nobody else."""
        req_ids = plan.scheduled_cached_reqs.req_ids
        return (
            self._only_decodes
            and plan.total_num_scheduled_tokens == len(req_ids)
            and not plan.scheduled_new_reqs
            and self.last_batch is not None
            and self.last_batch.req_ids == req_ids
        )

    def _pack(self, plan: SchedulerOutput) -> InputBatch:
        cached, new_reqs = plan.scheduled_cached_reqs, plan.scheduled_new_reqs
        req_ids, num_computed = cached.req_ids, cached.num_computed_tokens
        if new_reqs:
            req_ids = req_ids + [new.request_id for new in new_reqs]
            num_computed = num_computed + [new.num_computed_tokens for new in new_reqs]
        states = self.states.of(req_ids)
        return build_input_batch(
            req_ids,
            [state.row for state in states],
            list(map(plan.num_scheduled_tokens.__getitem__, req_ids)),
            num_computed,
            [state.prefill_len for state in states],
        )

    def _select_logits_rows(self, batch: InputBatch) -> LogitsRows:
        """The last token of every request that samples, and prompt tokens to be scored."""
        ends = batch.query_start_loc[1:]
        requests = [request for request, count in enumerate(batch.num_sampled) if count]
        indices = [ends[request] - 1 for request in requests]
        kinds = [SAMPLE] * len(requests)
        if self.states.scoring_prompt:
            for request, first, count in self._scored_tokens(batch):
                indices += range(first, first + count)
                requests += [request] * count
                kinds += [SCORE] * count
        return LogitsRows(indices=indices, requests=requests, kinds=kinds)

    def _scored_tokens(self, batch: InputBatch) -> Iterator[tuple[int, int, int]]:
        """(request, flat index of the first, number) of the prompt tokens that are scored.

        The last token of a prompt predicts the first output: it samples instead.
        """
        for request, request_id in enumerate(batch.req_ids):
            if request_id in self.states.scoring_prompt:
                left = self.states[request_id].prompt_len - 1 - batch.num_computed_tokens[request]
                count = min(batch.num_scheduled_tokens[request], left)
                yield request, batch.query_start_loc[request], max(0, count)

    def _make_steps(self, batch: InputBatch, logits: LogitsRows) -> list[tuple[Any, Any]]:
        """The device's copy of the batch; one more for each further slice of logits rows."""
        height = self._model.limits.max_logits_rows
        return [
            self._model.make_step(
                batch.num_tokens,
                batch.query_start_loc,
                batch.seq_lens,
                batch.rows,
                self._block_table,
                logits,
                slice(start, start + height),
            )
            for start in range(0, max(len(logits.indices), 1), height)
        ]

    def _stage_new_requests(
        self, new_reqs: Sequence[NewRequestData], batch: InputBatch, step: Any
    ) -> None:
        """Give their rows tokens and sampling parameters, in stream order."""
        for new in new_reqs:
            row = self.states[new.request_id].row
            token_ids = np.array(new.prefill_token_ids, dtype=np.int32)
            step.stage_tokens(self._model.token_table, row, 0, token_ids)
            self._stage_params(new, row, step)
            if new.num_cached_tokens > new.num_computed_tokens:
                step.keep_cached(batch.req_ids.index(new.request_id), new.num_cached_tokens)

    def _stage_params(self, new: NewRequestData, row: int, step: Any) -> None:
        params = row_params(new, self._vocab_size)
        stage_row(self._model.sample_state, step, row, new.prefill_token_ids, params)
