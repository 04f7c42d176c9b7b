"""The ghost executor: a device that keeps exact books instead of numbers.

It sees only decoded messages, keeps rows and block tables of its own, writes the ghost model's KV
through them and reads everything back through them: a wrong, stale, foreign or doubly written block
changes the text. It knows nothing of scheduler and KV manager, so it cannot share their bugs.

Steps run when they are launched, in order, as on a device; their results come back, as bytes, when
somebody waits for them. Whatever a plan may not ask for raises a Violation on the spot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from twostep.contracts.outputs import ModelRunnerOutput, TokenLogprobs
from twostep.contracts.plan import CachedRequestData, GrammarOutput, SchedulerOutput
from twostep.sim.ghost_memory import GhostMemory, Row
from twostep.sim.ghost_model import VOCAB, chain, drafter_is_right, pick, pick_allowed
from twostep.sim.violation import Violation

_ENCODER = msgspec.msgpack.Encoder()
_PLAN_DECODER = msgspec.msgpack.Decoder(SchedulerOutput)
_OUTPUT_DECODER = msgspec.msgpack.Decoder(ModelRunnerOutput)
_GRAMMAR_DECODER = msgspec.msgpack.Decoder(GrammarOutput)

StepFault = Callable[[SchedulerOutput], BaseException | None]


class GhostFuture:
    """The result of a step that ran already; nobody has seen it yet."""

    __slots__ = ("_data", "_executor", "error", "step_id")

    def __init__(self, executor: GhostExecutor, step_id: int, output: ModelRunnerOutput) -> None:
        self._executor = executor
        self._data = _ENCODER.encode(output)
        self.step_id = step_id
        self.error: BaseException | None = None

    def result(self) -> ModelRunnerOutput:
        """The step's result, decoded from bytes; raises what the step raised."""
        error = self.error
        if error is not None and not isinstance(error, Exception):
            self.error = None  # the wait was interrupted, not the device
            raise error
        self._executor.delivered(self.step_id)
        if error is not None:
            raise error
        return _OUTPUT_DECODER.decode(self._data)

    def done(self) -> bool:
        """Always."""
        return True


class GhostExecutor(GhostMemory):
    """An executor whose device is a dictionary."""

    def __init__(
        self,
        block_size: int,
        *,
        max_concurrent_batches: int = 2,
        window: int | None = None,
        num_drafts: int = 0,
        verify_kv: bool = True,
    ) -> None:
        """``num_drafts``: proposed with each result, where only one step is in flight."""
        super().__init__(block_size, window=window, verify_kv=verify_kv)
        self.max_concurrent_batches = max_concurrent_batches
        self.num_drafts = num_drafts if max_concurrent_batches == 1 else 0
        self.fail_execute: StepFault | None = None
        self.fail_sample: StepFault | None = None
        self.fail_result: StepFault | None = None
        self.bad_rows: Callable[[SchedulerOutput], dict[str, str]] | None = None
        self.lost_rows: Callable[[SchedulerOutput], set[str]] | None = None
        self.unmasked_rows: Callable[[SchedulerOutput], set[str]] | None = None
        """Requests for which the device samples what their grammar does not allow."""
        self.num_resets = 0
        self.is_shut_down = False
        self.broken_by: int | None = None
        """A step that has failed, and nobody knows it yet."""
        self._written: list[tuple[Row, int, int]] = []
        """Rows of the newest pass: row, first position, tokens."""
        self._refused: dict[int, dict[str, int]] = {}
        self._plan: SchedulerOutput | None = None
        self._output: ModelRunnerOutput | None = None
        self._masked: list[tuple[Row, Sequence[int], list[int]]] = []
        """Rows of the pending pass that wait for their masks: row, drafts, where tokens go."""

    # ---------------------------------------------------------------- the executor's interface

    def execute_model(self, scheduler_output: SchedulerOutput) -> GhostFuture | None:
        """Run a forward pass; its sampling must follow unless the plan has no tokens."""
        if self._output is not None:
            raise Violation("contract", "execute_model before the last pass was sampled")
        data = _ENCODER.encode(scheduler_output)
        plan = _PLAN_DECODER.decode(data)
        self._plan = plan
        self.received(plan, data)
        if self.fail_execute is not None and (error := self.fail_execute(plan)) is not None:
            raise error
        self.in_flight.add(plan.step_id)
        if self.broken_by is not None:
            # The step in front will fail: whatever is launched behind it fails with it.
            self._output = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
            return None if plan.total_num_scheduled_tokens else self._failed(plan, self._output)
        self._drop_rows(plan)
        output = self._forward(plan)
        if plan.total_num_scheduled_tokens == 0:
            return GhostFuture(self, plan.step_id, output)
        self._output = output
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> GhostFuture:
        """Sample for the rows that a grammar holds, and let the pass be waited for."""
        output, plan = self._output, self._plan
        if output is None or plan is None:
            raise Violation("contract", "sample_tokens without a forward pass")
        if self.broken_by is not None:
            return self._failed(plan, output)
        if self.fail_sample is not None and (error := self.fail_sample(plan)) is not None:
            raise error
        if self._masked or grammar_output is not None:
            self._sample_masked(plan, grammar_output)
        if self.num_drafts:
            output.draft_token_ids = self._propose_drafts(output)
        self._spoil(plan, output)
        future = GhostFuture(self, plan.step_id, output)
        if self.fail_result is not None:
            future.error = self.fail_result(plan)
            if isinstance(future.error, Exception):
                self.broken_by = plan.step_id
                self._garble()
        self._output = None
        return future

    def time_device(self, wanted: bool = True) -> None:
        """Nothing to time."""

    def reset_after_failure(self) -> None:
        """Forget the forward pass that has no sampling."""
        if self._output is not None and self._plan is not None:
            self.delivered(self._plan.step_id)
        self._output = None
        self._masked.clear()
        self.num_resets += 1

    def shutdown(self) -> None:
        """Nothing to free."""
        self.is_shut_down = True

    # ---------------------------------------------------------------- for those who watch

    def received(self, plan: SchedulerOutput, data: bytes) -> None:
        """A plan has arrived: decoded, and as bytes."""

    def delivered(self, step_id: int) -> None:
        """Somebody takes the result of a step, or nobody ever will."""
        self.in_flight.discard(step_id)
        if step_id == self.broken_by:
            self.broken_by = None
        self._refused.pop(step_id, None)

    # ---------------------------------------------------------------- what a plan says

    def _drop_rows(self, plan: SchedulerOutput) -> None:
        """Finished and preempted ids come first."""
        for request_id in plan.finished_req_ids:
            self.remove_row(request_id)
        for request_id in plan.preempted_req_ids:
            row = self.rows.get(request_id)
            if row is not None and any(self.holders[block] > 1 for block in row.table):
                self.events["preempted with shared blocks"] += 1
            self.remove_row(request_id)

    def _extend(self, cached: CachedRequestData, index: int) -> Row:
        """What the plan says of a request that has a row."""
        request_id = cached.req_ids[index]
        row = self.rows.get(request_id)
        if row is None:
            raise Violation("contract", f"{request_id} has no row, and is not told as new")
        refused = 0
        if self._refused:
            refused = sum(step.get(request_id, 0) for step in self._refused.values())
        computed = cached.num_computed_tokens[index] - refused
        num_outputs = cached.num_output_tokens[index] - refused
        if computed != row.computed or num_outputs != len(row.tokens) - row.prompt_len:
            raise Violation(
                "I9",
                f"{request_id}: the plan counts {computed} computed and {num_outputs} output "
                f"tokens, the device {row.computed} and {len(row.tokens) - row.prompt_len}",
            )
        if self.window is not None:
            self.leave_window(row, self.window)
        new_ids = cached.new_block_ids[index]
        if new_ids:
            self.hand_out(row, new_ids)
            row.table += new_ids
        return row

    # ---------------------------------------------------------------- the forward pass

    def _forward(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Rows run in plan order: a block may be filled and found in one step, in this order."""
        if sum(plan.num_scheduled_tokens.values()) != plan.total_num_scheduled_tokens:
            raise Violation("contract", "the total of the plan is not the sum of its rows")
        output = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        req_ids, rows = output.req_ids, output.sampled_token_ids
        drafts = plan.scheduled_spec_decode_tokens
        scheduled = plan.num_scheduled_tokens
        cached = plan.scheduled_cached_reqs
        known = {request_id: i for i, request_id in enumerate(cached.req_ids)}
        news = {new.request_id: new for new in plan.scheduled_new_reqs}
        if len(news) + len(known) != len(scheduled) or not drafts.keys() <= scheduled.keys():
            raise Violation("contract", "the rows of the plan are not the requests of the plan")
        step_id = plan.step_id
        self._written.clear()
        for request_id, num_tokens in scheduled.items():
            index = known.get(request_id)
            row = self.add_row(news[request_id]) if index is None else self._extend(cached, index)
            if num_tokens < 1:
                raise Violation("contract", f"{request_id} is planned with {num_tokens} tokens")
            before = row.computed
            row.last_step = step_id
            self._written.append((row, before, num_tokens))
            if (
                num_tokens == 1
                and before + 1 == len(row.tokens)
                and before >= row.cached
                and not row.is_structured
            ):
                sampled = [pick(self.decode(row, before))]
                row.tokens += sampled
            else:
                sampled = self._run(row, num_tokens, drafts.get(request_id, ()), step_id)
            req_ids.append(request_id)
            rows.append(sampled)
            if row.logprobs is not None or row.prompt_logprobs is not None:
                _add_logprobs(output, row, sampled)
                _add_prompt_logprobs(output, row, before, num_tokens)
        # The runner puts decodes first; turned round here, so that nobody relies on an order.
        req_ids.reverse()
        rows.reverse()
        return output

    def _run(self, row: Row, num_tokens: int, drafts: Sequence[int], step_id: int) -> list[int]:
        """One row: read all KV back, write the new tokens' KV, sample at the end of the known.

        The tokens of a row that a grammar holds come later, with the masks.
        """
        start = row.computed
        known = len(row.tokens)
        end = start + num_tokens - len(drafts)
        if end > known or (drafts and end != known):
            raise Violation(
                "I9",
                f"{row.request_id}: tokens {start} to {end} and {len(drafts)} drafts are planned, "
                f"{known} are known",
            )
        if start + num_tokens > len(row.table) * self.block_size:
            raise Violation("I9", f"{row.request_id} has no slots for its tokens")
        if start:
            self.read_back(row, start)
        if start < row.cached:
            self.pass_over(row, start)
            start += 1
        row.value = self.write(row, start, row.tokens[start:end])
        row.computed = end
        sampled: list[int] = []
        if end == known:
            if row.is_structured:
                self._masked.append((row, drafts, sampled))
            else:
                self._sample(row, drafts, (), sampled, step_id)
        return sampled

    def _sample(
        self,
        row: Row,
        drafts: Sequence[int],
        masks: Sequence[bytes],
        sampled: list[int],
        step_id: int,
    ) -> None:
        """Drafts are written like tokens; the first wrong one ends the row's step."""
        sampled.append(pick_allowed(row.value, masks[0]) if masks else pick(row.value))
        for index, draft in enumerate(drafts):
            right = sampled[-1]
            if draft < 0:
                # The draft is known on the device only: its drafter guesses well, or badly.
                draft = right if drafter_is_right(row.value) else (right + 1) % VOCAB
            if draft != right:
                refused = drafts[index:]
                self.events["draft refused"] += 1
                self.write_refused(row, [draft, *refused[1:]])
                self._refused.setdefault(step_id, {})[row.request_id] = len(refused)
                break
            row.value = self.write(row, row.computed, [draft])
            row.computed += 1
            value = row.value
            sampled.append(pick_allowed(value, masks[index + 1]) if masks else pick(value))
        row.tokens += sampled

    # ---------------------------------------------------------------- sampling

    def _sample_masked(self, plan: SchedulerOutput, grammar_output: GrammarOutput | None) -> None:
        """Sample under the masks that came for the pass."""
        masks: dict[str, list[bytes]] = {}
        if grammar_output is not None:
            decoded = _GRAMMAR_DECODER.decode(_ENCODER.encode(grammar_output))
            width = len(decoded.bitmask) // len(decoded.request_ids)
            for index, request_id in enumerate(decoded.request_ids):
                mask = decoded.bitmask[index * width : (index + 1) * width]
                masks.setdefault(request_id, []).append(mask)
        waiting = {row.request_id: 1 + len(drafts) for row, drafts, _ in self._masked}
        given = {request_id: len(rows) for request_id, rows in masks.items()}
        # Who ended with the step before needs no mask any more.
        if not given.items() <= waiting.items() or (
            len(given) < len(waiting) and not plan.pending_structured_output_tokens
        ):
            raise Violation("I13", f"rows that wait for masks: {waiting}; masks: {given}")
        unmasked = self.unmasked_rows(plan) if self.unmasked_rows is not None else set()
        assert self._output is not None
        for row, drafts, sampled in self._masked:
            rows = masks.get(row.request_id, ())
            if not rows:
                sampled.append((pick(row.value) + 1) % VOCAB)  # nobody may ever see it
                row.tokens += sampled
                continue
            if row.request_id in unmasked:
                rows = [bytes(byte ^ 255 for byte in mask) for mask in rows]
            self._sample(row, drafts, rows, sampled, plan.step_id)
            _add_logprobs(self._output, row, sampled)
        self._masked.clear()

    def _propose_drafts(self, output: ModelRunnerOutput) -> dict[str, list[int]]:
        """What follows the new tokens, guessed well or badly."""
        drafts: dict[str, list[int]] = {}
        for request_id, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            row = self.rows[request_id]
            value, token = row.value, row.tokens[-1]
            if sampled:
                found = drafts[request_id] = []
                for _ in range(self.num_drafts):
                    value = chain(value, token)
                    token = pick(value)
                    if not drafter_is_right(value):
                        token = (token + 1) % VOCAB
                    found.append(token)
        return drafts

    def _failed(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> GhostFuture:
        """A step behind a failed one."""
        self._output = None
        future = GhostFuture(self, plan.step_id, output)
        error = self.fail_result(plan) if self.fail_result is not None else None
        is_interrupt = error is not None and not isinstance(error, Exception)
        future.error = error if is_interrupt else RuntimeError("the step in front failed")
        return future

    def _garble(self) -> None:
        """What the newest pass wrote is worth nothing."""
        for row, first, num_tokens in self._written:
            for position in range(max(first, row.cached), first + num_tokens):
                block = row.table[position // self.block_size]
                self.slots[block * self.block_size + position % self.block_size] = -1
                self.block_values[block] = -1

    def _spoil(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Failures of single rows."""
        if self.bad_rows is not None:
            output.failed_req_ids = self.bad_rows(plan)
        if self.lost_rows is not None and (lost := self.lost_rows(plan)):
            kept = [i for i, request_id in enumerate(output.req_ids) if request_id not in lost]
            output.req_ids = [output.req_ids[i] for i in kept]
            output.sampled_token_ids = [output.sampled_token_ids[i] for i in kept]


def _add_logprobs(output: ModelRunnerOutput, row: Row, sampled: list[int]) -> None:
    """Made up from the tokens."""
    if row.logprobs is not None:
        output.logprobs[row.request_id] = [
            TokenLogprobs(token_ids=[t], logprobs=[-float(t)], rank=1) for t in sampled
        ]


def _add_prompt_logprobs(output: ModelRunnerOutput, row: Row, before: int, num_tokens: int) -> None:
    """Made up so that a reader can tell which position a value belongs to."""
    if row.prompt_logprobs is not None and before < row.prompt_len - 1:
        end = min(before + num_tokens, row.prompt_len - 1)
        output.prompt_logprobs[row.request_id] = [
            TokenLogprobs(token_ids=[row.tokens[p + 1]], logprobs=[-float(p)], rank=1)
            for p in range(before, end)
        ]
