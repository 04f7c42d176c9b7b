"""The ghost executor: a device that keeps exact books instead of numbers.

It sees only decoded messages, keeps rows and block tables of its own, writes the ghost model's KV
through them and reads everything back through them: a wrong, stale, foreign or doubly written block
changes the text. It knows nothing of scheduler and KV manager, so it cannot share their bugs.

Steps run when they are launched, in order, as on a device; their results come back, as bytes, when
somebody waits for them. Whatever a plan may not ask for raises a Violation on the spot.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import msgspec

from twostep.contracts.outputs import ModelRunnerOutput, TokenLogprobs
from twostep.contracts.plan import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from twostep.sim.ghost_model import VOCAB, chain, drafter_is_right, first_value, pick
from twostep.sim.violation import Violation

_ENCODER = msgspec.msgpack.Encoder()
_PLAN_DECODER = msgspec.msgpack.Decoder(SchedulerOutput)
_OUTPUT_DECODER = msgspec.msgpack.Decoder(ModelRunnerOutput)
_GRAMMAR_DECODER = msgspec.msgpack.Decoder(GrammarOutput)

StepFault = Callable[[SchedulerOutput], BaseException | None]


class Row:
    """What the device keeps of a request."""

    __slots__ = (
        "block_ends",
        "cached",
        "computed",
        "first_block",
        "last_step",
        "logprobs",
        "prompt_len",
        "prompt_logprobs",
        "request_id",
        "table",
        "tokens",
        "uid",
        "value",
    )

    def __init__(self, new: NewRequestData, uid: int) -> None:
        params = new.sampling_params
        self.request_id = new.request_id
        self.uid = uid
        self.tokens = new.prefill_token_ids
        """All tokens that the device knows, sampled ones included."""
        self.prompt_len = new.prompt_len
        self.table = new.block_ids
        self.logprobs = params.logprobs
        self.prompt_logprobs = params.prompt_logprobs
        self.cached = new.num_cached_tokens
        """Positions before it are somebody else's to write."""
        self.computed = 0
        """Positions that hold right KV."""
        self.value = first_value(params.seed or 0)
        """KV that position ``computed - 1`` must hold. The seed stands for the tenant."""
        self.block_ends: list[int] = []
        """KV that the last position of each full block must hold."""
        self.first_block = 0
        """Blocks before it fell out of the sliding window."""
        self.last_step = -1

    @property
    def last_sampled(self) -> int:
        """The newest token."""
        return self.tokens[-1]


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
        self._executor.delivered(self.step_id)
        if self.error is not None:
            raise self.error
        return _OUTPUT_DECODER.decode(self._data)

    def done(self) -> bool:
        """Always."""
        return True


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
        """``verify_kv``: read every position back; a long test may do without."""
        self.block_size = block_size
        self.max_concurrent_batches = max_concurrent_batches
        self.window = window
        self.verify_kv = verify_kv
        self.rows: dict[str, Row] = {}
        self.slots: dict[int, int] = {}
        """KV by slot."""
        self.block_values: dict[int, int] = {}
        """KV that was written last, by block: that of its last position, once it is full."""
        self.holders: dict[int, int] = defaultdict(int)
        """Live rows by block."""
        self.in_flight: set[int] = set()
        """Steps whose result nobody has taken."""
        self.fail_execute: StepFault | None = None
        self.fail_sample: StepFault | None = None
        self.fail_result: StepFault | None = None
        self.bad_rows: Callable[[SchedulerOutput], dict[str, str]] | None = None
        self.lost_rows: Callable[[SchedulerOutput], set[str]] | None = None
        self.events: Counter[str] = Counter()
        self.evicted: set[int] = set()
        """Ends of full blocks that were overwritten."""
        self.num_resets = 0
        self.is_shut_down = False
        self._writers: dict[int, int] = {}
        self._last_use: dict[int, int] = {}
        self._refused: dict[int, dict[str, int]] = {}
        self._pending: GhostFuture | None = None
        self._plan: SchedulerOutput | None = None
        self._next_uid = 0

    # ---------------------------------------------------------------- the executor's interface

    def execute_model(self, scheduler_output: SchedulerOutput) -> GhostFuture | None:
        """Run a forward pass; its sampling must follow unless the plan has no tokens."""
        if self._pending is not None:
            raise Violation("contract", "execute_model before the last pass was sampled")
        data = _ENCODER.encode(scheduler_output)
        plan = _PLAN_DECODER.decode(data)
        self._plan = plan
        self.received(plan, data)
        if self.fail_execute is not None and (error := self.fail_execute(plan)) is not None:
            raise error
        self.in_flight.add(plan.step_id)
        self._drop_rows(plan)
        future = GhostFuture(self, plan.step_id, self._forward(plan))
        if self.fail_result is not None:
            future.error = self.fail_result(plan)
        if plan.total_num_scheduled_tokens == 0:
            return future
        self._pending = future
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> GhostFuture:
        """Let the pass that just ran be waited for."""
        if grammar_output is not None:
            _GRAMMAR_DECODER.decode(_ENCODER.encode(grammar_output))
        future, plan = self._pending, self._plan
        if future is None or plan is None:
            raise Violation("contract", "sample_tokens without a forward pass")
        if self.fail_sample is not None and (error := self.fail_sample(plan)) is not None:
            raise error
        self._pending = None
        return future

    def time_device(self) -> None:
        """Nothing to time."""

    def reset_after_failure(self) -> None:
        """Forget the forward pass that has no sampling."""
        if self._pending is not None:
            self.delivered(self._pending.step_id)
        self._pending = None
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
        self._refused.pop(step_id, None)

    # ---------------------------------------------------------------- rows and tables

    def _drop_rows(self, plan: SchedulerOutput) -> None:
        """Finished and preempted ids come first."""
        for request_id in plan.finished_req_ids:
            self._remove(request_id)
        for request_id in plan.preempted_req_ids:
            row = self.rows.get(request_id)
            if row is not None and any(self.holders[block] > 1 for block in row.table):
                self.events["preempted with shared blocks"] += 1
            self._remove(request_id)

    def _add(self, new: NewRequestData) -> Row:
        request_id = new.request_id
        if request_id in self.rows:
            raise Violation("contract", f"{request_id} has a row already")
        self._next_uid += 1
        row = self.rows[request_id] = Row(new, self._next_uid)
        block_size = self.block_size
        num_hit = new.num_cached_tokens // block_size
        if (
            num_hit * block_size != new.num_cached_tokens
            or num_hit > len(row.table)
            or new.num_computed_tokens != min(new.num_cached_tokens, len(row.tokens) - 1)
        ):
            raise Violation(
                "contract",
                f"{request_id} has {len(row.tokens)} tokens, {new.num_cached_tokens} cached and "
                f"{new.num_computed_tokens} computed ones",
            )
        value = row.value
        for position in range(new.num_computed_tokens):
            value = chain(value, row.tokens[position])
            if position % block_size == block_size - 1:
                row.block_ends.append(value)
        row.value = value
        row.computed = new.num_computed_tokens
        self._count_hits(row, num_hit)
        holders = self.holders
        for block in row.table[:num_hit]:
            if block != 0:
                holders[block] += 1
        self._hand_out(row, row.table[num_hit:])
        return row

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
            self._leave_window(row, self.window)
        new_ids = cached.new_block_ids[index]
        if new_ids:
            self._hand_out(row, new_ids)
            row.table += new_ids
        return row

    def _count_hits(self, row: Row, num_hit: int) -> None:
        if num_hit and num_hit == len(row.tokens) // self.block_size:
            self.events["hit on the last full block"] += 1
        self.events["everything cached"] += row.cached == len(row.tokens)
        if self.evicted and len(row.tokens) > (num_hit + 1) * self.block_size:
            value = row.value
            for token in row.tokens[row.computed : row.computed + self.block_size]:
                value = chain(value, token)
            if value in self.evicted:
                self.events["evicted block asked for again"] += 1

    def _hand_out(self, row: Row, blocks: Sequence[int]) -> None:
        """Blocks that are this row's alone to write."""
        block_size = self.block_size
        for block in blocks:
            if block == 0:
                raise Violation("I4", f"{row.request_id} is to write the null block")
            if self.holders[block] and self.window is not None:
                # A row that sits this step out may have blocks that its next query does not see.
                for other in self.rows.values():
                    self._leave_window(other, self.window)
            if self.holders[block]:
                raise Violation(
                    "I4", f"block {block} is handed to {row.request_id} while a request holds it"
                )
            if self._last_use.get(block) in self.in_flight:
                raise Violation(
                    "I6",
                    f"block {block} is handed to {row.request_id}, but the result of step "
                    f"{self._last_use[block]}, which uses it, was not processed",
                )
            value = self.block_values.get(block)
            if value is not None and value == self.slots.get((block + 1) * block_size - 1):
                self.evicted.add(value)
            self.holders[block] = 1
            self._writers[block] = row.uid

    def _remove(self, request_id: str) -> None:
        row = self.rows.pop(request_id, None)
        if row is not None:
            self._let_go(row, row.table[row.first_block :])

    def _leave_window(self, row: Row, window: int) -> None:
        """No later query sees these blocks: others may have them."""
        first = max(0, row.computed - window + 1) // self.block_size
        if first > row.first_block:
            self.events["block fell out of the window"] += 1
            self._let_go(row, row.table[row.first_block : first])
            row.first_block = first

    def _let_go(self, row: Row, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block != 0:
                self.holders[block] -= 1
                if self._last_use.get(block, -1) < row.last_step:
                    self._last_use[block] = row.last_step

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
        for request_id, num_tokens in scheduled.items():
            index = known.get(request_id)
            row = self._add(news[request_id]) if index is None else self._extend(cached, index)
            if num_tokens < 1:
                raise Violation("contract", f"{request_id} is planned with {num_tokens} tokens")
            before = row.computed
            if num_tokens == 1 and before + 1 == len(row.tokens) and before >= row.cached:
                sampled = [self._decode(row, before, step_id)]
            else:
                sampled = self._run(row, num_tokens, drafts.get(request_id, ()), step_id)
            req_ids.append(request_id)
            rows.append(sampled)
            if row.logprobs is not None or row.prompt_logprobs is not None:
                _add_logprobs(output, row, before, num_tokens, sampled)
        # The runner puts decodes first; turned round here, so that nobody relies on an order.
        output.req_ids.reverse()
        output.sampled_token_ids.reverse()
        if self.bad_rows is not None:
            output.failed_req_ids = self.bad_rows(plan)
        if self.lost_rows is not None and (lost := self.lost_rows(plan)):
            kept = [i for i, request_id in enumerate(output.req_ids) if request_id not in lost]
            output.req_ids = [output.req_ids[i] for i in kept]
            output.sampled_token_ids = [output.sampled_token_ids[i] for i in kept]
        return output

    def _decode(self, row: Row, position: int, step_id: int) -> int:
        """``_run`` for the plain case, as short as it can be: most rows of most steps."""
        block_size = self.block_size
        index, offset = divmod(position, block_size)
        table = row.table
        if index >= len(table):
            raise Violation("I9", f"{row.request_id} has no slots for its tokens")
        row.last_step = step_id
        self._read_back(row, position)
        block = table[index]
        if self._writers.get(block) != row.uid or self.holders[block] != 1:
            self._report_write(row, block)
        row.value = value = chain(row.value, row.tokens[position])
        self.slots[block * block_size + offset] = value
        self.block_values[block] = value
        row.computed = position + 1
        if offset == block_size - 1:
            row.block_ends.append(value)
        token = pick(value)
        row.tokens.append(token)
        return token

    def _run(self, row: Row, num_tokens: int, drafts: Sequence[int], step_id: int) -> list[int]:
        """One row: read all KV back, write the new tokens' KV, sample at the end of the known."""
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
        row.last_step = step_id
        if start:
            self._read_back(row, start)
        if start < row.cached:
            self._pass_over(row, start)
            start += 1
        value = self._write(row, start, row.tokens[start:end])
        row.value = value
        row.computed = end
        if end < known:
            return []
        sampled = [pick(value)]
        if drafts:
            sampled = self._verify(row, sampled, drafts, step_id)
        row.tokens += sampled
        return sampled

    def _read_back(self, row: Row, seq_len: int) -> None:
        """All positions before ``seq_len`` that the next query sees, through the block table."""
        block_size = self.block_size
        table = row.table
        last = seq_len - 1
        if (
            last >= 0
            and self.slots.get(table[last // block_size] * block_size + last % block_size)
            != row.value
        ):
            self._report_read(row, last)
        if not self.verify_kv:
            return
        num_full = seq_len // block_size
        first = 0
        if self.window is not None:
            first = max(0, seq_len - self.window + 1) // block_size
        values = list(map(self.block_values.get, table[first:num_full]))
        expected = row.block_ends[first:] if first else row.block_ends
        if values != expected:
            for index, value in enumerate(expected, first):
                if self.block_values.get(table[index]) != value:
                    self._report_read(row, (index + 1) * block_size - 1)
            raise Violation("I5", f"{row.request_id} has blocks that its tokens do not fill")

    def _report_read(self, row: Row, position: int) -> None:
        block = row.table[position // self.block_size]
        raise Violation(
            "I5",
            f"{row.request_id} reads position {position} in block {block}, which does not hold "
            f"the KV of its tokens up to there",
        )

    def _pass_over(self, row: Row, position: int) -> None:
        """The last token of a prompt that is cached as a whole: its KV is read, not written."""
        row.value = chain(row.value, row.tokens[position])
        row.block_ends.append(row.value)
        self._read_back(row, position + 1)

    def _write(self, row: Row, start: int, tokens: Sequence[int]) -> int:
        """KV of these tokens, position by position; returns the last one's."""
        block_size = self.block_size
        slots, block_values, table = self.slots, self.block_values, row.table
        uid = row.uid
        value = row.value
        position = start
        for token in tokens:
            index, offset = divmod(position, block_size)
            block = table[index]
            if self._writers.get(block) != uid or self.holders[block] != 1:
                self._report_write(row, block)
            value = chain(value, token)
            slots[block * block_size + offset] = value
            block_values[block] = value
            position += 1
            if position % block_size == 0:
                row.block_ends.append(value)
        return value

    def _report_write(self, row: Row, block: int) -> None:
        owner = "is not its own" if self._writers.get(block) != row.uid else "others share"
        raise Violation("I4", f"{row.request_id} writes block {block}, which {owner}")

    def _verify(
        self, row: Row, sampled: list[int], drafts: Sequence[int], step_id: int
    ) -> list[int]:
        """Drafts are written like tokens; the first wrong one ends the row's step."""
        for index, draft in enumerate(drafts):
            right = sampled[-1]
            if draft < 0:
                # The draft is known on the device only: its drafter guesses well, or badly.
                draft = right if drafter_is_right(row.value) else (right + 1) % VOCAB
            if draft != right:
                refused = drafts[index:]
                self.events["draft refused"] += 1
                self._write_refused(row, [draft, *refused[1:]])
                self._refused.setdefault(step_id, {})[row.request_id] = len(refused)
                break
            row.value = self._write(row, row.computed, [draft])
            row.computed += 1
            sampled.append(pick(row.value))
        return sampled

    def _write_refused(self, row: Row, tokens: Sequence[int]) -> None:
        """Wrong KV behind the last right position, as a device leaves it there."""
        num_ends = len(row.block_ends)
        self._write(row, row.computed, [token % VOCAB for token in tokens])
        del row.block_ends[num_ends:]


def _add_logprobs(
    output: ModelRunnerOutput, row: Row, before: int, num_tokens: int, sampled: list[int]
) -> None:
    """Made up so that a reader can tell which position a value belongs to."""
    if row.logprobs is not None:
        output.logprobs[row.request_id] = [
            TokenLogprobs(token_ids=[t], logprobs=[-float(t)], rank=1) for t in sampled
        ]
    if row.prompt_logprobs is not None and before < row.prompt_len - 1:
        end = min(before + num_tokens, row.prompt_len - 1)
        output.prompt_logprobs[row.request_id] = [
            TokenLogprobs(token_ids=[row.tokens[p + 1]], logprobs=[-float(p)], rank=1)
            for p in range(before, end)
        ]
