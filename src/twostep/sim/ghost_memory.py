"""The ghost device's memory: who may write which block, and what every slot holds.

KV goes in and comes out through the block tables of the rows. Whatever a table may not do raises a
Violation on the spot.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from twostep.contracts.plan import NewRequestData
from twostep.sim.ghost_model import VOCAB, chain, chain_all, first_value
from twostep.sim.violation import Violation


class Row:
    """What the device keeps of a request."""

    __slots__ = (
        "block_ends",
        "cached",
        "computed",
        "first_block",
        "is_structured",
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
        self.is_structured = params.structured_outputs is not None
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


class GhostMemory:
    """Rows, their block tables, and the slots behind them."""

    def __init__(self, block_size: int, *, window: int | None, verify_kv: bool) -> None:
        """``verify_kv``: read every position back; a long test may do without."""
        self.block_size = block_size
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
        self.events: Counter[str] = Counter()
        self.evicted: set[int] = set()
        """Ends of full blocks that were overwritten."""
        self._writers: dict[int, int] = {}
        self._last_use: dict[int, int] = {}
        self._next_uid = 0

    # ---------------------------------------------------------------- rows and their tables

    def add_row(self, new: NewRequestData) -> Row:
        """A request that the device has not heard of, or has forgotten."""
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
        row.computed = new.num_computed_tokens
        if row.computed:
            values = chain_all(row.value, row.tokens[: row.computed])
            row.block_ends = values[block_size - 1 :: block_size]
            row.value = values[-1]
        self._count_hits(row, num_hit)
        holders = self.holders
        for block in row.table[:num_hit]:
            if block != 0:
                holders[block] += 1
        self.hand_out(row, row.table[num_hit:])
        return row

    def _count_hits(self, row: Row, num_hit: int) -> None:
        if num_hit and num_hit == len(row.tokens) // self.block_size:
            self.events["hit on the last full block"] += 1
        self.events["everything cached"] += row.cached == len(row.tokens)
        if self.evicted and len(row.tokens) > (num_hit + 1) * self.block_size:
            missed = row.tokens[row.computed : row.computed + self.block_size]
            if chain_all(row.value, missed)[-1] in self.evicted:
                self.events["evicted block asked for again"] += 1

    def hand_out(self, row: Row, blocks: Sequence[int]) -> None:
        """Blocks that are this row's alone to write."""
        block_size = self.block_size
        for block in blocks:
            if block == 0:
                raise Violation("I4", f"{row.request_id} is to write the null block")
            if self.holders[block] and self.window is not None:
                # A row that sits this step out may have blocks that its next query does not see.
                for other in self.rows.values():
                    self.leave_window(other, self.window)
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

    def remove_row(self, request_id: str) -> None:
        """A request is over, or lost its blocks; unknown ids are ignored."""
        row = self.rows.pop(request_id, None)
        if row is not None:
            self._let_go(row, row.table[row.first_block :])

    def leave_window(self, row: Row, window: int) -> None:
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

    # ---------------------------------------------------------------- reading and writing

    def decode(self, row: Row, position: int) -> int:
        """Read all before ``position`` back and write it; returns its KV.

        As short as it can be: most rows of most steps come here.
        """
        block_size = self.block_size
        index, offset = divmod(position, block_size)
        table = row.table
        if index >= len(table):
            raise Violation("I9", f"{row.request_id} has no slots for its tokens")
        self.read_back(row, position)
        block = table[index]
        if self._writers.get(block) != row.uid or self.holders[block] != 1:
            self._report_write(row, block)
        row.value = value = chain(row.value, row.tokens[position])
        self.slots[block * block_size + offset] = value
        self.block_values[block] = value
        row.computed = position + 1
        if offset == block_size - 1:
            row.block_ends.append(value)
        return value

    def read_back(self, row: Row, seq_len: int) -> None:
        """All positions before ``seq_len`` that the next query sees, through the block table."""
        block_size = self.block_size
        table = row.table
        last = seq_len - 1
        if last < 0:
            return
        slot = table[last // block_size] * block_size + last % block_size
        if self.slots.get(slot) != row.value:
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

    def pass_over(self, row: Row, position: int) -> None:
        """The last token of a prompt that is cached as a whole: its KV is read, not written."""
        row.value = chain(row.value, row.tokens[position])
        row.block_ends.append(row.value)
        self.read_back(row, position + 1)

    def write(self, row: Row, start: int, tokens: Sequence[int]) -> int:
        """KV of these tokens, block by block; returns the last one's."""
        block_size = self.block_size
        values = chain_all(row.value, tokens)
        count = len(values)
        done = 0
        while done < count:
            index, offset = divmod(start + done, block_size)
            block = row.table[index]
            if self._writers.get(block) != row.uid or self.holders[block] != 1:
                self._report_write(row, block)
            end = min(done + block_size - offset, count)
            slot = block * block_size + offset
            self.slots.update(zip(range(slot, slot + end - done), values[done:end], strict=True))
            self.block_values[block] = values[end - 1]
            if offset + end - done == block_size:
                row.block_ends.append(values[end - 1])
            done = end
        return values[-1] if values else row.value

    def _report_write(self, row: Row, block: int) -> None:
        owner = "is not its own" if self._writers.get(block) != row.uid else "others share"
        raise Violation("I4", f"{row.request_id} writes block {block}, which {owner}")

    def write_refused(self, row: Row, tokens: Sequence[int]) -> None:
        """Wrong KV behind the last right position, as a device leaves it there."""
        num_ends = len(row.block_ends)
        self.write(row, row.computed, [token % VOCAB for token in tokens])
        del row.block_ends[num_ends:]
