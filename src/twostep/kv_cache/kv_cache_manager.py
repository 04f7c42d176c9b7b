"""Which blocks each request holds: prefix-cache lookup, allocation, publication, release.

Two rules make asynchronous steps safe:

* **Stream order.** A block may be found by its hash as soon as the step that fills it was
  *planned*: whoever finds it is planned later, or later in the same step, and the device works
  in that order. ``withdraw_since`` takes back what a failed step should have filled.
* **The fence.** A block is never handed out again before every step that was planned with it
  has been *processed*: freed blocks of steps in flight are parked until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from twostep.config.engine import CacheConfig
from twostep.kv_cache.block import Block
from twostep.kv_cache.block_hash import BlockHash, extend_block_hashes
from twostep.kv_cache.block_pool import BlockPool


class KVRequest(Protocol):
    """What the manager reads of a request; the scheduler owns it."""

    request_id: str
    all_token_ids: list[int]
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

    __slots__ = ("blocks", "num_published", "num_skipped")

    def __init__(self, blocks: list[Block], num_published: int) -> None:
        self.blocks = blocks
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
        self.max_blocks_per_request = -(-max_model_len // self.block_size)
        if self.sliding_window is not None:
            span = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
            windowed = -(-span // self.block_size) + 1
            self.max_blocks_per_request = min(self.max_blocks_per_request, windowed)
        self.last_processed_step = -1
        self._drop_last_hit_block = drop_last_hit_block
        self._tables: dict[str, RequestBlocks] = {}
        self._parked: dict[int, list[Block]] = {}
        self._published: dict[int, list[Block]] = {}

    # ---------------------------------------------------------------- looking

    @property
    def usage(self) -> float:
        """Share of the pool that is held, 0..1."""
        return self.pool.usage

    @property
    def max_tokens_per_request(self) -> int | None:
        """Longest sequence that one request alone can hold; None where a window bounds it."""
        if self.sliding_window and self.max_blocks_per_request <= self.pool.num_usable_blocks:
            return None
        return self.pool.num_usable_blocks * self.block_size

    def get_block_ids(self, request_id: str) -> list[int]:
        """All blocks of a request, in order of position; the null block where none is kept."""
        return [block.block_id for block in self._tables[request_id].blocks]

    def get_computed_blocks(self, request: KVRequest) -> list[Block]:
        """Longest cached prefix of a request without blocks. Nothing is held yet.

        At least one token is left to compute, because its logits are needed.
        """
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return []
        max_hit = (request.num_tokens - 1) // self.block_size
        hashes = request.block_hashes[:max_hit]
        if self.sliding_window is None:
            found = self._longest_prefix(hashes)
        else:
            found = self._longest_windowed_prefix(hashes, self.sliding_window)
        return found[:-1] if self._drop_last_hit_block else found

    def blocks_to_take(
        self, request: KVRequest, num_tokens: int, hit_blocks: Sequence[Block] = ()
    ) -> int:
        """Free blocks it takes to hold the first ``num_tokens`` tokens; revived hits count."""
        table = self._tables.get(request.request_id)
        held = len(table.blocks) if table is not None else 0
        revived = sum(block.ref_cnt == 0 for block in hit_blocks)
        return max(0, -(-num_tokens // self.block_size) - held - len(hit_blocks)) + revived

    def can_allocate_slots(
        self,
        request: KVRequest,
        num_new_tokens: int,
        hit_blocks: Sequence[Block] = (),
        *,
        full_sequence_must_fit: bool = False,
    ) -> bool:
        """Whether ``allocate_slots`` would succeed. Changes nothing."""
        num_hit = len(hit_blocks) * self.block_size
        num_tokens = request.num_computed_tokens + num_hit + num_new_tokens
        take = self.blocks_to_take(request, num_tokens, hit_blocks)
        if full_sequence_must_fit:
            whole = self.blocks_to_take(request, request.num_tokens, hit_blocks)
            take = max(take, min(whole, self.max_blocks_per_request))
        return take <= self.pool.num_free_blocks

    def fits_when_released(self, request: KVRequest, num_new_tokens: int) -> bool:
        """Whether it will fit once the steps in flight were processed."""
        take = self.blocks_to_take(request, request.num_computed_tokens + num_new_tokens)
        parked = Counter(block.block_id for blocks in self._parked.values() for block in blocks)
        blocks = self.pool.blocks
        returning = sum(blocks[block_id].ref_cnt == refs for block_id, refs in parked.items())
        return take <= self.pool.num_free_blocks + returning

    # ---------------------------------------------------------------- holding

    def allocate_slots(
        self, request: KVRequest, num_new_tokens: int, step_id: int
    ) -> list[int] | None:
        """Room for the next tokens of a request that holds blocks.

        Returns the ids of the blocks to append, [] when the last one has room, and None when
        too few are free; nothing has changed then, except that blocks behind the sliding window
        were given back.
        """
        table = self._tables[request.request_id]
        if self.sliding_window is not None:
            self._free_behind_window(request, table, self.sliding_window)
        num_tokens = request.num_computed_tokens + num_new_tokens
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        new_ids: list[int] = []
        if missing > 0:
            if missing > self.pool.num_free_blocks:
                return None
            new_blocks = self.pool.get_new_blocks(missing)
            table.blocks += new_blocks
            new_ids = [block.block_id for block in new_blocks]
        # Most tokens complete no block: spare them the call.
        if num_tokens >= (table.num_published + 1) * self.block_size:
            self._publish(request, table, num_tokens, step_id)
        return new_ids

    def allocate_first_slots(
        self,
        request: KVRequest,
        num_new_tokens: int,
        step_id: int,
        hit_blocks: Sequence[Block] = (),
        *,
        full_sequence_must_fit: bool = False,
    ) -> bool:
        """Room for a request without blocks: holds the hits and takes blocks for the rest.

        False when too few are free; nothing has changed then.
        """
        if not self.can_allocate_slots(
            request, num_new_tokens, hit_blocks, full_sequence_must_fit=full_sequence_must_fit
        ):
            return False
        self.pool.touch(block for block in hit_blocks if block is not self.pool.null_block)
        num_tokens = len(hit_blocks) * self.block_size + num_new_tokens
        missing = -(-num_tokens // self.block_size) - len(hit_blocks)
        blocks = [*hit_blocks, *self.pool.get_new_blocks(missing)]
        table = RequestBlocks(blocks, num_published=len(hit_blocks))
        self._tables[request.request_id] = table
        self._publish(request, table, num_tokens, step_id)
        return True

    def hash_new_blocks(self, request: KVRequest) -> None:
        """Hash the blocks that the request's tokens have filled since the last call."""
        if self.enable_prefix_caching:
            extend_block_hashes(
                request.block_hashes, request.all_token_ids, self.block_size, request.cache_salt
            )

    def publish_new_blocks(self, request: KVRequest) -> None:
        """Offer blocks whose last token has just become known, if their KV is planned already."""
        table = self._tables.get(request.request_id)
        if table is not None:
            self._publish(request, table, request.num_computed_tokens, request.last_step_id)

    # ---------------------------------------------------------------- releasing

    def free(self, request: KVRequest) -> None:
        """Take all blocks of a request back, now or when its steps in flight were processed."""
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        null_block = self.pool.null_block
        blocks = [block for block in reversed(table.blocks) if block is not null_block]
        self._release(blocks, request.last_step_id)

    def step_processed(self, step_id: int) -> None:
        """The results of all steps up to this one are in: release what waited for them."""
        self.last_processed_step = step_id
        if self._parked:
            for step in [step for step in self._parked if step <= step_id]:
                self.pool.free_blocks(self._parked.pop(step))
        if self._published:
            for step in [step for step in self._published if step <= step_id]:
                del self._published[step]

    def withdraw_since(self, step_id: int) -> None:
        """Steps from this one on failed: what they should have filled must not be found."""
        for step in [step for step in self._published if step >= step_id]:
            for block in self._published.pop(step):
                self.pool.evict(block)

    def withdraw(self, request: KVRequest, num_good_tokens: int = 0) -> None:
        """Make blocks of a request unfindable, from the one that holds token ``num_good_tokens``.

        For tokens that were planned and then taken out of the plan, and for KV that turned out
        to be bad.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            return
        first = num_good_tokens // self.block_size
        for block in table.blocks[first : table.num_published]:
            self.pool.evict(block)
        table.num_published = min(table.num_published, first)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False, and nothing happens, while a request holds blocks."""
        if self._tables:
            return False
        self.pool.evict_all()
        self._published.clear()
        return True

    # ---------------------------------------------------------------- inside

    def _longest_prefix(self, hashes: Sequence[BlockHash]) -> list[Block]:
        found: list[Block] = []
        for block_hash in hashes:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _longest_windowed_prefix(self, hashes: Sequence[BlockHash], window: int) -> list[Block]:
        """As above, where only the blocks that the next query can see must be there."""
        enough = max(1, -(-(window - 1) // self.block_size))
        run: list[Block] = []
        for end in range(len(hashes), 0, -1):
            block = self.pool.get_cached_block(hashes[end - 1])
            if block is None:
                run = []
                continue
            run.append(block)
            if len(run) == enough:
                break
        run.reverse()
        first = end - 1 if run else 0
        return [self.pool.null_block] * first + run

    def _publish(
        self, request: KVRequest, table: RequestBlocks, num_planned: int, step_id: int
    ) -> None:
        """Let full blocks be found whose tokens are known and planned."""
        if not self.enable_prefix_caching:
            return
        num_full = min(num_planned, request.num_tokens) // self.block_size
        start = table.num_published
        if num_full <= start:
            return
        # No null block is among these: blocks fall behind the window after they were published.
        fresh = table.blocks[start:num_full]
        for block, block_hash in zip(fresh, request.block_hashes[start:num_full], strict=True):
            self.pool.cache_block(block, block_hash)
        table.num_published = num_full
        self._published.setdefault(step_id, []).extend(fresh)

    def _free_behind_window(self, request: KVRequest, table: RequestBlocks, window: int) -> None:
        """Give blocks back that no later query can see; the null block takes their place."""
        oldest_query = request.num_computed_tokens - request.num_output_placeholders
        num_skipped = max(0, oldest_query - window + 1) // self.block_size
        if num_skipped <= table.num_skipped:
            return
        null_block = self.pool.null_block
        gone = [b for b in table.blocks[table.num_skipped : num_skipped] if b is not null_block]
        table.blocks[table.num_skipped : num_skipped] = [null_block] * (
            num_skipped - table.num_skipped
        )
        table.num_skipped = num_skipped
        self._release(gone[::-1], request.last_step_id)

    def _release(self, blocks: list[Block], last_step_id: int) -> None:
        if last_step_id > self.last_processed_step:
            self._parked.setdefault(last_step_id, []).extend(blocks)
        else:
            self.pool.free_blocks(blocks)
