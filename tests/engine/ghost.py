"""A model without numbers: the KV of a position is a hash of all tokens up to it.

The ghost executor sees only decoded plans, keeps tables of its own, writes KV through them and
reads everything back through them: a wrong, stale, foreign or doubly written block changes the
text. It imports nothing from the scheduler, so it cannot share its bugs. Besides, it checks that
no block is written that an unprocessed step of somebody else uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from twostep.contracts.outputs import ModelRunnerOutput, TokenLogprobs
from twostep.contracts.plan import GrammarOutput, SchedulerOutput

VOCAB = 61
FIRST = 7


def chain(previous: int, token: int) -> int:
    """KV of a position, from the KV before it and its token."""
    return (previous * 1_000_003 + token * 7919 + 13) % (1 << 61)


def pick(window: list[int]) -> int:
    """The next token, from all the KV a query sees."""
    state = len(window)
    for value in window:
        state = (state * 31 + value) % (1 << 61)
    return state // 7 % VOCAB


def oracle(
    prompt: list[int], max_tokens: int, stop_ids: set[int], window: int | None = None
) -> list[int]:
    """The answer to a request that runs alone, without cache, chunks or blocks."""
    kv: list[int] = []
    tokens = list(prompt)
    for _ in range(max_tokens):
        while len(kv) < len(tokens):
            kv.append(chain(kv[-1] if kv else FIRST, tokens[len(kv)]))
        tokens.append(pick(kv if window is None else kv[-window:]))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclasses.dataclass
class Row:
    """What the runner keeps of a request."""

    prefill_ids: list[int]
    prompt_len: int
    table: list[int]
    logprobs: int | None
    prompt_logprobs: int | None
    incarnation: int
    computed: int = 0
    last_sampled: int = -1


@dataclasses.dataclass
class GhostFuture:
    """Runs nothing: the step ran at launch, as on a device that keeps its order."""

    output: ModelRunnerOutput
    step_id: int
    executor: GhostExecutor
    error: Exception | None = None

    def result(self) -> ModelRunnerOutput:
        """The step's result, sent as bytes."""
        self.executor.in_flight.pop(self.step_id, None)
        if self.error is not None:
            raise self.error
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self.output), type=ModelRunnerOutput)

    def done(self) -> bool:
        """Always."""
        return True


@dataclasses.dataclass
class Flat:
    """The flat batch of a step, as the runner would lay it out (decodes first)."""

    req_ids: list[str]
    query_start_loc: list[int]
    positions: list[int]
    seq_lens: list[int]
    input_ids: list[int]
    slots: list[int]
    logits_indices: list[int]
    num_sampled: list[int]


class GhostExecutor:
    """An executor whose device is a dictionary."""

    def __init__(
        self,
        block_size: int,
        *,
        max_concurrent_batches: int = 2,
        window: int | None = None,
        verify_kv: bool = True,
    ) -> None:
        self.block_size = block_size
        self.max_concurrent_batches = max_concurrent_batches
        self.window = window
        self.verify_kv = verify_kv
        self.rows: dict[str, Row] = {}
        self.kv: dict[int, tuple[int, int]] = {}
        self.in_flight: dict[int, dict[int, set[tuple[str, int]]]] = {}
        self.plans: list[SchedulerOutput] = []
        self.batches: list[Flat] = []
        self.calls: list[str] = []
        self.num_resets = 0
        self.is_shut_down = False
        self.fail_execute: Callable[[SchedulerOutput], Exception | None] = lambda plan: None
        self.fail_sample: Callable[[SchedulerOutput], Exception | None] = lambda plan: None
        self.fail_result: Callable[[SchedulerOutput], Exception | None] = lambda plan: None
        self.bad_rows: Callable[[SchedulerOutput], dict[str, str]] = lambda plan: {}
        self._pending: GhostFuture | None = None
        self._incarnation = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> GhostFuture | None:
        """Queue a forward pass; its sampling must follow unless it has no tokens."""
        assert self._pending is None, "sample_tokens did not follow"
        plan = msgspec.msgpack.decode(
            msgspec.msgpack.encode(scheduler_output), type=SchedulerOutput
        )
        self.plans.append(plan)
        self.calls.append("execute_model")
        if (error := self.fail_execute(plan)) is not None:
            raise error
        self._apply(plan)
        future = GhostFuture(self._forward(plan), plan.step_id, self)
        future.error = self.fail_result(plan)
        if plan.total_num_scheduled_tokens == 0:
            return future
        self._pending = future
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> GhostFuture:
        """Queue sampling for the forward pass just queued."""
        assert grammar_output is None
        assert self._pending is not None
        self.calls.append("sample_tokens")
        if (error := self.fail_sample(self.plans[-1])) is not None:
            raise error
        future, self._pending = self._pending, None
        return future

    def time_device(self) -> None:
        """Nothing to time."""

    def reset_after_failure(self) -> None:
        """Forget the forward pass that has no sampling."""
        self._pending = None
        self.in_flight.pop(self.plans[-1].step_id, None)
        self.num_resets += 1

    def shutdown(self) -> None:
        """Nothing to free."""
        self.is_shut_down = True

    def _apply(self, plan: SchedulerOutput) -> None:
        """Finished and preempted ids first, then new requests, then changes of known ones."""
        for request_id in plan.finished_req_ids | plan.preempted_req_ids:
            self.rows.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            assert new.request_id not in self.rows, "a row is never added twice"
            self._incarnation += 1
            self.rows[new.request_id] = Row(
                prefill_ids=new.prefill_token_ids,
                prompt_len=new.prompt_len,
                table=list(new.block_ids),
                logprobs=new.sampling_params.logprobs,
                prompt_logprobs=new.sampling_params.prompt_logprobs,
                incarnation=self._incarnation,
                computed=new.num_computed_tokens,
            )
        cached = plan.scheduled_cached_reqs
        for request_id, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self.rows[request_id]
            assert row.computed == computed, "device and plan disagree about computed tokens"
            row.table += new_ids or []

    def _forward(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        order = sorted(plan.num_scheduled_tokens.items(), key=lambda item: item[1])
        assert sum(n for _, n in order) == plan.total_num_scheduled_tokens
        assert all(n > 0 for _, n in order)
        used: dict[int, set[tuple[str, int]]] = {}
        inputs = {request_id: self._input_ids(request_id, n) for request_id, n in order}
        self.batches.append(self._flat(order, inputs))
        # All rows write before any row reads: a block may be filled and found in one step.
        # Plan order, because a finder is planned after its finding was.
        for request_id, n in plan.num_scheduled_tokens.items():
            self._write(request_id, n, inputs[request_id], used)
        output = ModelRunnerOutput(
            req_ids=[request_id for request_id, _ in order],
            sampled_token_ids=[self._sample(request_id, n) for request_id, n in order],
            failed_req_ids=self.bad_rows(plan),
        )
        for (request_id, n), sampled in zip(order, output.sampled_token_ids, strict=True):
            row = self.rows[request_id]
            self._add_logprobs(output, request_id, row, n, sampled)
            row.computed += n
        self.in_flight[plan.step_id] = used
        return output

    def _input_ids(self, request_id: str, n: int) -> list[int]:
        row = self.rows[request_id]
        ids = row.prefill_ids[row.computed : row.computed + n]
        if len(ids) < n:
            assert len(ids) == n - 1, "at most one token comes from the step before"
            assert row.last_sampled >= 0
            ids = [*ids, row.last_sampled]
        return ids

    def _slot(self, row: Row, position: int) -> int:
        block = row.table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _write(
        self, request_id: str, n: int, ids: list[int], used: dict[int, set[tuple[str, int]]]
    ) -> None:
        row = self.rows[request_id]
        holder = (request_id, row.incarnation)
        assert len(row.table) * self.block_size >= row.computed + n, "no slots for the tokens"
        for offset, token in enumerate(ids):
            position = row.computed + offset
            slot = self._slot(row, position)
            assert slot >= self.block_size, "the null block is never written"
            block = slot // self.block_size
            for step in self.in_flight.values():
                assert step.get(block, {holder}) <= {holder}, (
                    f"block {block} is written while a step in flight uses it"
                )
            previous = self._read(row, position - 1) if position else FIRST
            self.kv[slot] = (position, chain(previous, token))
        oldest = 0 if self.window is None else max(0, row.computed - self.window + 1)
        for block in row.table[oldest // self.block_size :]:
            if block != 0:
                used.setdefault(block, set()).add(holder)

    def _read(self, row: Row, position: int) -> int:
        stored, value = self.kv[self._slot(row, position)]
        assert stored == position, f"position {position} holds the KV of position {stored}"
        return value

    def _sample(self, request_id: str, n: int) -> list[int]:
        row = self.rows[request_id]
        seq_len = row.computed + n
        if seq_len < len(row.prefill_ids):
            return []
        start = 0 if self.window is None else max(0, seq_len - self.window)
        if self.verify_kv:
            row.last_sampled = pick([self._read(row, p) for p in range(start, seq_len)])
        else:
            row.last_sampled = self._read(row, seq_len - 1) % VOCAB
        return [row.last_sampled]

    def _add_logprobs(
        self, output: ModelRunnerOutput, request_id: str, row: Row, n: int, sampled: list[int]
    ) -> None:
        if row.logprobs is not None:
            output.logprobs[request_id] = [
                TokenLogprobs(token_ids=[t], logprobs=[-float(t)], rank=1) for t in sampled
            ]
        if row.prompt_logprobs is not None and row.computed < row.prompt_len - 1:
            end = min(row.computed + n, row.prompt_len - 1)
            output.prompt_logprobs[request_id] = [
                TokenLogprobs(token_ids=[row.prefill_ids[p + 1]], logprobs=[-float(p)], rank=1)
                for p in range(row.computed, end)
            ]

    def _flat(self, order: list[tuple[str, int]], inputs: dict[str, list[int]]) -> Flat:
        flat = Flat([], [0], [], [], [], [], [], [])
        for request_id, n in order:
            row = self.rows[request_id]
            positions = range(row.computed, row.computed + n)
            flat.req_ids.append(request_id)
            flat.query_start_loc.append(flat.query_start_loc[-1] + n)
            flat.positions += positions
            flat.seq_lens.append(row.computed + n)
            flat.input_ids += inputs[request_id]
            flat.slots += [self._slot(row, p) for p in positions]
            flat.logits_indices.append(flat.query_start_loc[-1] - 1)
            flat.num_sampled.append(int(row.computed + n >= len(row.prefill_ids)))
        return flat
