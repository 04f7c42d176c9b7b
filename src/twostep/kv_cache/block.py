"""One block of the paged KV cache, as the planner sees it: no memory, only who holds it."""

from __future__ import annotations

from twostep.kv_cache.block_hash import BlockHash

NULL_BLOCK_ID = 0
"""Stands for positions whose KV is not kept; never handed out, never freed."""


class Block:
    """Owned by the pool. ``block_hash`` is set while the block can be found in the prefix cache."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: BlockHash | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        """For failed assertions and debuggers."""
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hashed={bool(self.block_hash)})"
