"""All blocks of the KV cache: who is free, and which content can be found again."""

from __future__ import annotations

from collections.abc import Iterable

from twostep.kv_cache.block import NULL_BLOCK_ID, Block
from twostep.kv_cache.block_hash import BlockHash
from twostep.kv_cache.free_block_queue import FreeBlockQueue


class BlockPool:
    """Hands blocks out, takes them back, and keeps the content of free ones for as long as it can.

    Blocks are counted references: several requests share a block whose content they have in
    common. A block with no references is free, and stays findable by its hash until it is
    handed out again.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "the null block and one to use"
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.null_block.ref_cnt = 1
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        # One block for nearly every hash; a dict by block id where several hold the same content.
        self.cached: dict[BlockHash, Block | dict[int, Block]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, findable ones included."""
        return self.free_queue.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        """All but the null block."""
        return len(self.blocks) - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0..1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def get_cached_block(self, block_hash: BlockHash) -> Block | None:
        """A block with this content, or None. Its references are not counted up: see touch."""
        found = self.cached.get(block_hash)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def get_new_blocks(self, count: int) -> list[Block]:
        """Take ``count`` blocks for writing; what they held is forgotten. The caller checked."""
        blocks = self.free_queue.popleft(count)
        for block in blocks:
            if block.block_hash is not None:
                self.evict(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Hold blocks found by their hash."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered: Iterable[Block]) -> None:
        """Drop one reference of each. Free ones with a hash queue at the tail, others in front.

        Requests pass their blocks last one first, so that the head of a prompt, which others
        most likely share, is evicted last.
        """
        hashed: list[Block] = []
        unhashed: list[Block] = []
        for block in ordered:
            assert block.ref_cnt > 0, f"block {block.block_id} freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (unhashed if block.block_hash is None else hashed).append(block)
        self.free_queue.prepend(unhashed)
        self.free_queue.append(hashed)

    def cache_block(self, block: Block, block_hash: BlockHash) -> None:
        """Let a full block be found by its hash. A twin with the same content may exist."""
        assert block.block_hash is None, f"block {block.block_id} is cached already"
        block.block_hash = block_hash
        found = self.cached.get(block_hash)
        if found is None:
            self.cached[block_hash] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self.cached[block_hash] = {found.block_id: found, block.block_id: block}

    def evict(self, block: Block) -> None:
        """Make a block unfindable; its references stay as they are."""
        block_hash = block.block_hash
        if block_hash is None:
            return
        block.block_hash = None
        found = self.cached[block_hash]
        if isinstance(found, dict):
            del found[block.block_id]
            if found:
                return
        del self.cached[block_hash]

    def evict_all(self) -> None:
        """Make every block unfindable."""
        self.cached.clear()
        for block in self.blocks:
            block.block_hash = None
