"""Blocks nobody holds, least recently used first; a block in the middle is unlinked in O(1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from twostep.kv_cache.block import Block


class FreeBlockQueue:
    """Doubly linked list through the blocks themselves, between two sentinels."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.num_free_blocks = 0
        self._head = Block(-1)
        self._tail = Block(-1)
        self._link(self._head, self._tail)
        self.append(blocks)

    def popleft(self, count: int) -> list[Block]:
        """Take the ``count`` blocks that were free for the longest time; the caller checked."""
        taken: list[Block] = []
        block = self._head.next_free
        for _ in range(count):
            assert block is not None
            assert block is not self._tail, "more blocks asked for than are free"
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._link(self._head, block)
        self.num_free_blocks -= count
        return taken

    def remove(self, block: Block) -> None:
        """Unlink a block: a cache hit revives it."""
        before, after = block.prev_free, block.next_free
        assert before is not None, f"block {block.block_id} is not free"
        assert after is not None
        self._link(before, after)
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, blocks: Iterable[Block]) -> None:
        """Add at the tail, in the given order: handed out last."""
        last = self._tail.prev_free
        assert last is not None
        self._insert_after(last, blocks)

    def prepend(self, blocks: Iterable[Block]) -> None:
        """Add at the front, in the given order: handed out next."""
        self._insert_after(self._head, blocks)

    def __iter__(self) -> Iterator[Block]:
        """From the next block to hand out to the last one."""
        block = self._head.next_free
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next_free

    def _insert_after(self, last: Block, blocks: Iterable[Block]) -> None:
        after = last.next_free
        assert after is not None
        for block in blocks:
            assert block.next_free is None, f"block {block.block_id} is already free"
            self._link(last, block)
            last = block
            self.num_free_blocks += 1
        self._link(last, after)

    @staticmethod
    def _link(left: Block, right: Block) -> None:
        left.next_free = right
        right.prev_free = left
