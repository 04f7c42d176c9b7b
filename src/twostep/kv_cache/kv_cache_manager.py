"""Which blocks each request holds: prefix-cache lookup, allocation, publication, release.

Two rules make asynchronous steps safe:

* **Stream order.** A block may be found by its hash as soon as the step that fills it was
  *planned*: whoever finds it is planned later, or later in the same step, and the device works
  in that order. ``withdraw_since`` takes back what a failed step should have filled.
* **The fence.** A block is never handed out again before every step that was planned with it
  has been *processed*: freed blocks of steps in flight are parked until then.

A decoding request comes here once per block, not once per token: ``num_slots`` tells the scheduler
how far it may go alone. What it filled since is published at its next visit, or when it leaves.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from twostep.config.engine import CacheConfig
from twostep.contracts.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from twostep.kv_cache.block_hash import BlockHash, extend_block_hashes
from twostep.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool


class KVRequest(Protocol):
    """What the manager reads of a request; the scheduler owns it."""

    request_id: str
    all_token_ids: array[int]
    block_hashes: list[BlockHash]
    cache_salt: str | None
    num_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    last_step_id: int
    """The last plan it was part of, -1 before the first."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every token must be computed, cached or not."""
        ...


class RequestBlocks:
    """The blocks of one request, in order of position."""

    __slots__ = ("block_ids", "num_published", "num_skipped")

    def __init__(self, block_ids: list[int], num_published: int) -> None:
        self.block_ids = block_ids
        self.num_published = num_published
        """Leading blocks that were offered to the prefix cache."""
        self.num_skipped = 0
        """Leading blocks that fell out of the sliding window."""


class KVCacheManager:
    """Plans the paged KV cache. Knows block ids only; the memory belongs to the runner."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_model_len: int,
        max_in_flight_tokens: int,
        drop_last_hit_block: bool = False,
    ) -> None:
        """``max_in_flight_tokens``: tokens that all steps in flight can hold together.

        ``drop_last_hit_block``: a drafter that reads hidden states must recompute the last one.
        """
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.sliding_window = config.sliding_window
        self.pool = BlockPool(config.num_blocks)
        self.watermark_blocks = int(config.watermark * config.num_blocks)
        self.max_blocks_per_request = -(-max_model_len // self.block_size)
        if self.sliding_window is not None:
            span = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
            windowed = -(-span // self.block_size) + 1
            self.max_blocks_per_request = min(self.max_blocks_per_request, windowed)
        self.last_processed_step = -1
        self._drop_last_hit_block = drop_last_hit_block
        self._tables: dict[str, RequestBlocks] = {}
        self._parked: dict[int, list[int]] = {}
        self._published: dict[int, list[int]] = {}
        self._events: list[KVCacheEvent] | None = None
        if config.enable_kv_cache_events:
            self._events = []
            self.pool.removed = []

    # ---------------------------------------------------------------- looking

    @property
    def max_tokens_per_request(self) -> int | None:
        """Longest sequence that one request alone can hold; None where a window bounds it."""
        if self.sliding_window and self.max_blocks_per_request <= self.pool.num_usable_blocks:
            return None
        return self.pool.num_usable_blocks * self.block_size

    def get_block_ids(self, request_id: str) -> list[int]:
        """All blocks of a request, in order of position; the null block where none is kept."""
        return self._tables[request_id].block_ids.copy()

    def num_slots(self, request_id: str) -> int:
        """Tokens that the request's blocks can hold."""
        return len(self._tables[request_id].block_ids) * self.block_size

    def get_computed_blocks(self, request: KVRequest) -> tuple[list[int], int]:
        """Longest cached prefix of a request without blocks: its blocks, its tokens.

        Nothing is held yet. At least one token is left to compute, because its logits are needed.
        If everything is cached, all blocks are found, the one of the last token as well: its KV is
        there, and is not written again.
        """
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return [], 0
        self.hash_new_blocks(request)
        hashes = request.block_hashes
        if self._drop_last_hit_block:
            hashes = hashes[: (request.num_tokens - 1) // self.block_size]
        if self.sliding_window is None:
            found = self._longest_prefix(hashes)
        else:
            found = self._longest_windowed_prefix(hashes, request.num_tokens, self.sliding_window)
        if self._drop_last_hit_block:
            found = found[:-1]
        return found, min(len(found) * self.block_size, request.num_tokens - 1)

    def blocks_to_take(
        self, request: KVRequest, num_tokens: int, hit_blocks: Sequence[int] = ()
    ) -> int:
        """Free blocks it takes to hold the first ``num_tokens`` tokens; revived hits count."""
        table = self._tables.get(request.request_id)
        held = len(table.block_ids) if table is not None else 0
        reusable = self.pool.reusable
        revived = sum(block_id in reusable for block_id in hit_blocks)
        return max(0, -(-num_tokens // self.block_size) - held - len(hit_blocks)) + revived

    def can_allocate_first_slots(
        self,
        request: KVRequest,
        num_tokens: int,
        hit_blocks: Sequence[int] = (),
        *,
        full_sequence_must_fit: bool = False,
        reserve: int = 0,
    ) -> bool:
        """Whether ``allocate_first_slots`` would succeed. Changes nothing."""
        take = self.blocks_to_take(request, num_tokens, hit_blocks)
        if full_sequence_must_fit:
            whole = self.blocks_to_take(request, request.num_tokens, hit_blocks)
            take = max(take, min(whole, self.max_blocks_per_request))
        return take + reserve <= self.pool.num_free_blocks

    def fits_when_released(self, request: KVRequest, num_new_tokens: int) -> bool:
        """Whether it will fit once the steps in flight were processed."""
        take = self.blocks_to_take(request, request.num_computed_tokens + num_new_tokens)
        parked = self._count_parked()
        holders = self.pool.num_holders
        returning = sum(holders(block_id) == times for block_id, times in parked.items())
        return take <= self.pool.num_free_blocks + returning

    def gives_blocks_back(self, request: KVRequest) -> bool:
        """Whether some block of the request has no other holder than steps in flight."""
        parked = self._count_parked()
        holders = self.pool.num_holders
        return any(
            block_id != NULL_BLOCK_ID and holders(block_id) - parked[block_id] == 1
            for block_id in self._tables[request.request_id].block_ids
        )

    # ---------------------------------------------------------------- holding

    def allocate_slots(
        self, request: KVRequest, num_new_tokens: int, step_id: int
    ) -> list[int] | None:
        """Room for the next tokens of a request that holds blocks.

        Returns the ids of the blocks to append, [] when the last one has room, and None when
        too few are free; nothing has changed then, except that blocks were published, and those
        behind the sliding window given back.
        """
        table = self._tables[request.request_id]
        computed = request.num_computed_tokens
        if computed >= (table.num_published + 1) * self.block_size:
            self._publish(request, table, computed, request.last_step_id)
        if self.sliding_window is not None:
            self._free_behind_window(request, table, self.sliding_window)
        num_tokens = computed + num_new_tokens
        missing = -(-num_tokens // self.block_size) - len(table.block_ids)
        new_ids: list[int] = []
        if missing > 0:
            if missing > self.pool.num_free_blocks:
                return None
            new_ids = self.pool.get_new_blocks(missing)
            table.block_ids += new_ids
        if num_tokens >= (table.num_published + 1) * self.block_size:
            self._publish(request, table, num_tokens, step_id)
        return new_ids

    def allocate_first_slots(
        self,
        request: KVRequest,
        num_tokens: int,
        step_id: int,
        hit_blocks: Sequence[int] = (),
        *,
        full_sequence_must_fit: bool = False,
        reserve: int = 0,
    ) -> bool:
        """Room for the first ``num_tokens`` tokens of a request without blocks, the hits held.

        ``reserve``: blocks that must stay free. False when too few are free; nothing has changed
        then.
        """
        if not self.can_allocate_first_slots(
            request,
            num_tokens,
            hit_blocks,
            full_sequence_must_fit=full_sequence_must_fit,
            reserve=reserve,
        ):
            return False
        self.pool.touch(block_id for block_id in hit_blocks if block_id != NULL_BLOCK_ID)
        missing = -(-num_tokens // self.block_size) - len(hit_blocks)
        block_ids = [*hit_blocks, *self.pool.get_new_blocks(missing)]
        table = RequestBlocks(block_ids, num_published=len(hit_blocks))
        self._tables[request.request_id] = table
        self._publish(request, table, num_tokens, step_id)
        return True

    def hash_new_blocks(self, request: KVRequest) -> None:
        """Hash the blocks that the request's tokens have filled since the last call."""
        if self.enable_prefix_caching:
            extend_block_hashes(
                request.block_hashes, request.all_token_ids, self.block_size, request.cache_salt
            )

    # ---------------------------------------------------------------- releasing

    def free(self, request: KVRequest, *, publish: bool = True) -> None:
        """Take all blocks of a request back, now or when its steps in flight were processed.

        ``publish``: full blocks whose KV is computed or planned may be found from now on.
        """
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        if publish:
            self._publish(request, table, request.num_computed_tokens, request.last_step_id)
        blocks = table.block_ids[::-1]
        if self.sliding_window is not None:
            blocks = [block_id for block_id in blocks if block_id != NULL_BLOCK_ID]
        self._release(blocks, request.last_step_id)

    def step_processed(self, step_id: int) -> None:
        """The results of all steps up to this one are in: release what waited for them."""
        if self._parked or self._published:
            for step in range(self.last_processed_step + 1, step_id + 1):
                self._published.pop(step, None)
                parked = self._parked.pop(step, None)
                if parked is not None:
                    self.pool.free_blocks(parked)
        self.last_processed_step = step_id

    def withdraw_since(self, step_id: int) -> None:
        """Steps from this one on failed: what they should have filled must not be found."""
        for step in [step for step in self._published if step >= step_id]:
            for block_id in self._published.pop(step):
                self.pool.evict(block_id)

    def withdraw(self, request: KVRequest, num_good_tokens: int = 0) -> None:
        """Make blocks of a request unfindable, from the one that holds token ``num_good_tokens``.

        For tokens that were planned and then taken out of the plan, and for KV that turned out
        to be bad.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            return
        first = num_good_tokens // self.block_size
        for block_id in table.block_ids[first : table.num_published]:
            self.pool.evict(block_id)
        table.num_published = min(table.num_published, first)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False, and nothing happens, while a request holds blocks."""
        if self._tables:
            return False
        self.pool.evict_all()
        self._published.clear()
        if self._events is not None:
            self._note_removals()
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVCacheEvent] | None:
        """What happened to the prefix cache since the last call; None if nothing, or not kept."""
        if self._events is None:
            return None
        self._note_removals()
        taken, self._events = self._events, []
        return taken or None

    # ---------------------------------------------------------------- inside

    def _count_parked(self) -> Counter[int]:
        """{block: fences that hold it}."""
        return Counter(block_id for blocks in self._parked.values() for block_id in blocks)

    def _longest_prefix(self, hashes: Iterable[BlockHash]) -> list[int]:
        cached = self.pool.cached
        found: list[int] = []
        for block_hash in hashes:
            block_id = cached.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _longest_windowed_prefix(
        self, hashes: Sequence[BlockHash], num_tokens: int, window: int
    ) -> list[int]:
        """As above, where only the blocks that the next query can see must be there.

        That query stands behind the last block found, or on its last position if that is the
        last token.
        """
        run: list[int] = []
        enough = 1
        for end in range(len(hashes), 0, -1):
            block_id = self.pool.cached.get(hashes[end - 1])
            if block_id is None:
                run = []
                continue
            if not run:
                seen = window if end * self.block_size == num_tokens else window - 1
                enough = max(1, -(-seen // self.block_size))
            run.append(block_id)
            if len(run) == enough:
                break
        run.reverse()
        first = end - 1 if run else 0
        return [NULL_BLOCK_ID] * first + run

    def _publish(
        self, request: KVRequest, table: RequestBlocks, num_planned: int, step_id: int
    ) -> None:
        """Let full blocks be found whose tokens are known and planned, by ``step_id`` at last."""
        if not self.enable_prefix_caching:
            return
        start = table.num_published
        end = min(num_planned, request.num_tokens) // self.block_size
        if end <= start:
            return
        self.hash_new_blocks(request)
        # No null block is among these: a block is published before it can leave the window.
        fresh = self.pool.cache_blocks(table.block_ids[start:end], request.block_hashes[start:end])
        table.num_published = end
        if step_id > self.last_processed_step:
            self._published.setdefault(step_id, []).extend(fresh)
        if self._events is not None:
            self._note_removals()
            self._note_stored(request, start, end)

    def _note_stored(self, request: KVRequest, start: int, end: int) -> None:
        assert self._events is not None
        tokens = request.all_token_ids[start * self.block_size : end * self.block_size]
        self._events.append(
            BlockStored(
                block_hashes=request.block_hashes[start:end],
                parent_block_hash=request.block_hashes[start - 1] if start else None,
                token_ids=tokens.tolist(),
                block_size=self.block_size,
                cache_salt=request.cache_salt,
            )
        )

    def _note_removals(self) -> None:
        if self._events is not None and self.pool.removed:
            self._events.append(BlockRemoved(block_hashes=self.pool.removed))
            self.pool.removed = []

    def _free_behind_window(self, request: KVRequest, table: RequestBlocks, window: int) -> None:
        """Give blocks back that no later query can see; the null block takes their place."""
        oldest_query = request.num_computed_tokens - request.num_output_placeholders
        num_skipped = max(0, oldest_query - window + 1) // self.block_size
        if num_skipped <= table.num_skipped:
            return
        gone = [b for b in table.block_ids[table.num_skipped : num_skipped] if b != NULL_BLOCK_ID]
        table.block_ids[table.num_skipped : num_skipped] = [NULL_BLOCK_ID] * (
            num_skipped - table.num_skipped
        )
        table.num_skipped = num_skipped
        self._release(gone[::-1], request.last_step_id)

    def _release(self, block_ids: list[int], last_step_id: int) -> None:
        if last_step_id > self.last_processed_step:
            self._parked.setdefault(last_step_id, []).extend(block_ids)
        else:
            self.pool.free_blocks(block_ids)
