"""An executor whose device is a cost model: real rows, real flat batches, predicted time.

It applies plans to the same row tables and packs them with the same code as the CPU's runner. Only
the numbers are missing: tokens come from a function, and the cost model says how long a step takes.
The device works like a stream: a step starts when it was launched and the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.runner.graphs import BatchDescriptor, GraphDispatcher, choose_capture_sizes
from twostep.runner.input_batch import InputBatch, Int32Array, build_input_batch
from twostep.runner.request_states import RequestStates
from twostep.sim.clock import VirtualClock
from twostep.sim.device import SimDevice
from twostep.sim.step_cost import StepCost, StepCostModel

NextToken = Callable[[str, int], int]
"""(request id, number of the output token, from 1) → token id."""
AcceptDrafts = Callable[[str, int, int], int]
"""(request id, number of the first output token, drafts) → how many of them are right."""
HostCost = Callable[[SchedulerOutput], float]
"""Virtual seconds that the host needs to plan and launch a step."""

HISTORY = 64


class SimStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step as the device saw it. B requests, T tokens."""

    step_id: int
    batch: InputBatch
    input_ids: Int32Array
    """[T] token ids that the model reads; -1 for drafts whose ids only a drafter would know."""
    from_device: Int32Array
    """Flat indices of the input tokens that came from the rows' ``last_sampled``."""
    block_index: Int32Array
    """[T] index into the request's block table of each token's slot."""
    block_offset: Int32Array
    """[T] offset in that block."""
    block_id: Int32Array
    """[T] physical id of that block."""
    slot_mapping: NDArray[np.int64]
    """[T] block_id * block size + offset; -1 where the KV is there already and is not written."""
    graph: BatchDescriptor
    logits_indices: list[int]
    """[rows] flat index of every row that gets logits."""
    num_sampled: Int32Array
    """[B] tokens drawn: 0 for an unfinished chunk."""
    sampled_token_ids: dict[str, list[int]]
    last_sampled: dict[str, int]
    """What the device keeps as the next step's input, by request."""
    cost: StepCost
    launched: float
    """Virtual seconds."""
    device_start: float
    device_end: float


class SimFuture:
    """A ``StepFuture``: waiting for it moves the virtual clock to the end of the step."""

    def __init__(self, output: ModelRunnerOutput, end: float, clock: VirtualClock) -> None:
        self.end = end
        self._output = output
        self._clock = clock

    def done(self) -> bool:
        """Whether the step's end is past."""
        return self._clock.monotonic() >= self.end

    def result(self) -> ModelRunnerOutput:
        """Wait, in virtual time."""
        self._clock.advance_to(self.end)
        return self._output


class _Launched(msgspec.Struct, frozen=True):
    """A forward pass that waits for ``sample_tokens``."""

    plan: SchedulerOutput
    batch: InputBatch
    drafts: list[int]
    """[B] drafts among the tokens of each request."""
    graph: BatchDescriptor
    input_ids: Int32Array
    from_device: Int32Array
    moment: float


class SimExecutor:
    """Implements ``Executor`` on a virtual device."""

    def __init__(
        self,
        cost_model: StepCostModel,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        clock: VirtualClock,
        *,
        next_token: NextToken = lambda request_id, number: number,
        accept_drafts: AcceptDrafts = lambda request_id, number, drafts: 0,
        max_concurrent_batches: int = 2,
        num_spec_tokens: int = 0,
        enforce_eager: bool = False,
        host_cost: HostCost | None = None,
        history: int = HISTORY,
    ) -> None:
        """``history``: how many steps are kept in ``steps``; 0 saves the time to describe them.

        By default a request's n-th output token has id n, and no draft is accepted.
        """
        self.max_concurrent_batches = max_concurrent_batches
        self.clock = clock
        self.cost_model = cost_model
        self.block_size = cache_config.block_size
        max_seqs = scheduler_config.max_num_seqs
        max_blocks = -(-scheduler_config.max_model_len // self.block_size) + 1
        self.states = RequestStates(max_seqs, max_blocks)
        self.last_sampled: Int32Array = np.full(max_seqs, -1, dtype=np.int32)
        """[rows] on the device: what each request's next step reads."""
        self.graphs = make_dispatcher(
            cost_model.device, scheduler_config, num_spec_tokens, enforce_eager=enforce_eager
        )
        self.steps: dict[int, SimStep] = {}
        """The last steps by step id."""
        self.on_step: Callable[[BatchDescriptor, StepCost, int], None] | None = None
        """Told (graph, cost, requests) of every step with tokens when its sampling is queued."""
        self.busy_until = 0.0
        """Virtual seconds when the device has done all that was launched."""
        self._next_token = next_token
        self._accept_drafts = accept_drafts
        self._host_cost = host_cost
        self._history = history
        self._num_computed: dict[str, int] = {}
        self._prefill_ids: dict[str, Int32Array] = {}
        self._launched: _Launched | None = None
        self._times_device = False

    # ---------------------------------------------------------------- Executor

    def execute_model(self, scheduler_output: SchedulerOutput) -> SimFuture | None:
        """See ``Executor.execute_model``."""
        if self._launched is not None:
            raise RuntimeError("execute_model called twice without sample_tokens")
        if self._host_cost is not None:
            now = self.clock.monotonic()
            self.clock.advance_to(now + self._host_cost(scheduler_output))
        self._update_states(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            empty = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
            return SimFuture(empty, self.clock.monotonic(), self.clock)
        batch = self._prepare_inputs(scheduler_output)
        planned = scheduler_output.scheduled_spec_decode_tokens
        drafts = [len(planned.get(request_id, ())) for request_id in batch.req_ids]
        input_ids, from_device = self._input_ids(batch, drafts, planned)
        graph = self.graphs.dispatch(
            batch.num_tokens,
            len(batch.req_ids),
            max_query_len=batch.max_query_len,
            min_num_computed=batch.min_num_computed,
        )
        self._launched = _Launched(
            scheduler_output, batch, drafts, graph, input_ids, from_device, self.clock.monotonic()
        )
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> SimFuture:
        """See ``Executor.sample_tokens``."""
        launched, self._launched = self._launched, None
        if launched is None:
            raise RuntimeError("sample_tokens called without execute_model")
        if grammar_output is not None:
            raise RuntimeError("a simulated device has no grammars: its tokens are made up")
        batch = launched.batch
        logits_indices = _logits_indices(batch, launched.drafts)
        cost = self.cost_model.predict(
            launched.graph,
            batch.num_scheduled_tokens,
            batch.num_computed_tokens,
            len(logits_indices),
        )
        start = max(launched.moment, self.busy_until)
        self.busy_until = start + cost.total
        sampled = {
            request_id: self._sample(request_id, index, launched)
            for index, request_id in enumerate(batch.req_ids)
        }
        if self.on_step is not None:
            self.on_step(launched.graph, cost, len(batch.req_ids))
        if self._history:
            self._remember(launched, logits_indices, sampled, cost, start)
        req_ids = list(launched.plan.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=req_ids, sampled_token_ids=[sampled[request_id] for request_id in req_ids]
        )
        if self._times_device:
            output.device_spans = _spans(cost, start)
            output.graph_mode = launched.graph.mode.value
        return SimFuture(output, self.busy_until, self.clock)

    def time_device(self, wanted: bool = True) -> None:
        """See ``Executor.time_device``; seconds of the virtual clock."""
        self._times_device = wanted

    def reset_after_failure(self) -> None:
        """See ``Executor.reset_after_failure``."""
        self._launched = None

    def shutdown(self) -> None:
        """See ``Executor.shutdown``."""
        self._launched = None
        self.clock.advance_to(self.busy_until)

    # ---------------------------------------------------------------- rows and inputs

    def _update_states(self, plan: SchedulerOutput) -> None:
        for request_id in (*plan.finished_req_ids, *plan.preempted_req_ids):
            self._drop(request_id)
        for new in plan.scheduled_new_reqs:
            self._drop(new.request_id)
            state = self.states.add(new)
            self.last_sampled[state.row] = -1
            self._num_computed[new.request_id] = new.num_computed_tokens
            self._prefill_ids[new.request_id] = np.array(new.prefill_token_ids, dtype=np.int32)
        cached = plan.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids:
                self.states.append_blocks(self.states[request_id], block_ids)

    def _drop(self, request_id: str) -> None:
        self.states.drop(request_id)
        self._num_computed.pop(request_id, None)
        self._prefill_ids.pop(request_id, None)

    def _prepare_inputs(self, plan: SchedulerOutput) -> InputBatch:
        """The flat batch. Computed tokens are the device's own: the plan hopes for all drafts."""
        req_ids = list(plan.num_scheduled_tokens)
        states = [self.states[request_id] for request_id in req_ids]
        return build_input_batch(
            req_ids,
            [state.row for state in states],
            list(plan.num_scheduled_tokens.values()),
            [self._num_computed[request_id] for request_id in req_ids],
            [state.prefill_len for state in states],
        )

    def _input_ids(
        self, batch: InputBatch, drafts: list[int], planned: dict[str, list[int]]
    ) -> tuple[Int32Array, Int32Array]:
        """[T] what the model reads, and the flat indices that come from ``last_sampled``."""
        input_ids = np.empty(batch.num_tokens, dtype=np.int32)
        from_device = []
        for index, request_id in enumerate(batch.req_ids):
            start, end = batch.query_start_loc[index : index + 2]
            computed = batch.num_computed_tokens[index]
            known = self._prefill_ids[request_id][computed : computed + end - start]
            input_ids[start : start + len(known)] = known
            if drafts[index]:
                input_ids[end - drafts[index] : end] = planned[request_id]
            missing = end - drafts[index] - start - len(known)
            if missing:
                last = self.last_sampled[batch.rows[index]]
                if missing > 1 or last < 0:
                    raise RuntimeError(f"the device does not know the next tokens of {request_id}")
                input_ids[start + len(known)] = last
                from_device.append(start + len(known))
        return input_ids, np.array(from_device, dtype=np.int32)

    # ---------------------------------------------------------------- sampling

    def _sample(self, request_id: str, index: int, launched: _Launched) -> list[int]:
        """Draw a request's tokens and keep the last one, and its count, on the device."""
        batch, drafts = launched.batch, launched.drafts[index]
        seq_len = batch.seq_lens[index]
        self._num_computed[request_id] = seq_len
        if not batch.num_sampled[index]:
            return []
        # seq_len tokens are computed; the drafts among them have yet to prove right.
        number = seq_len - drafts - self.states[request_id].prompt_len + 1
        accepted = self._accept_drafts(request_id, number, drafts) if drafts else 0
        self._num_computed[request_id] -= drafts - accepted
        tokens = [self._next_token(request_id, number + i) for i in range(accepted + 1)]
        self.last_sampled[batch.rows[index]] = tokens[-1]
        return tokens

    def _remember(
        self,
        launched: _Launched,
        logits_indices: list[int],
        sampled: dict[str, list[int]],
        cost: StepCost,
        start: float,
    ) -> None:
        batch, step_id = launched.batch, launched.plan.step_id
        block_index, block_offset = batch.slot_mapping(self.block_size)
        token_rows = np.repeat(batch.rows, batch.num_scheduled_tokens)
        block_id = self.states.block_table[token_rows, block_index]
        slot_mapping = block_id.astype(np.int64) * self.block_size + block_offset
        for new in launched.plan.scheduled_new_reqs:
            first = batch.query_start_loc[batch.req_ids.index(new.request_id)]
            slot_mapping[first : first + new.num_cached_tokens - new.num_computed_tokens] = -1
        self.steps[step_id] = SimStep(
            step_id=step_id,
            batch=batch,
            input_ids=launched.input_ids,
            from_device=launched.from_device,
            block_index=block_index,
            block_offset=block_offset,
            block_id=block_id,
            slot_mapping=slot_mapping,
            graph=launched.graph,
            logits_indices=logits_indices,
            num_sampled=np.array([len(sampled[r]) for r in batch.req_ids], dtype=np.int32),
            sampled_token_ids=sampled,
            last_sampled={
                request_id: int(self.last_sampled[row])
                for request_id, row in zip(batch.req_ids, batch.rows, strict=True)
            },
            cost=cost,
            launched=launched.moment,
            device_start=start,
            device_end=self.busy_until,
        )
        while len(self.steps) > self._history:
            del self.steps[next(iter(self.steps))]


def make_dispatcher(
    device: SimDevice,
    scheduler_config: SchedulerConfig,
    num_spec_tokens: int = 0,
    *,
    enforce_eager: bool = False,
) -> GraphDispatcher:
    """The graphs that a device of this kind captures at its start."""
    sizes = None
    if device.max_capture_size is not None:
        sizes = choose_capture_sizes(
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            num_spec_tokens=num_spec_tokens,
            max_capture_size=device.max_capture_size,
        )
    return GraphDispatcher(
        device.graph_mode,
        capture_sizes=sizes,
        max_num_seqs=scheduler_config.max_num_seqs,
        decode_query_len=1 + num_spec_tokens,
        enforce_eager=enforce_eager,
    )


def _logits_indices(batch: InputBatch, drafts: list[int]) -> list[int]:
    """The last token of every request, and the drafts before it."""
    if not any(drafts):
        return batch.logits_indices
    ends = batch.query_start_loc[1:]
    rows = [range(end - 1 - n, end) for end, n in zip(ends, drafts, strict=True)]
    return [index for row in rows for index in row]


def _spans(cost: StepCost, start: float) -> list[tuple[str, float, float]]:
    """When the device works on the parts of a step."""
    end = start + cost.total
    sample = end - cost.sampling
    logits = sample - cost.logits
    return [("forward", start, logits), ("logits", logits, sample), ("sample", sample, end)]
