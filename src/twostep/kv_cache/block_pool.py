"""All blocks of the KV cache: who is free, and which content can be found again.

A block is a number. Held blocks cost nothing here unless they are shared: a step that hands out
512 blocks moves one slice of a list. Free blocks whose content is worth nothing are a stack; free
blocks that can still be found queue behind all of those, in the order in which they were freed.
"""

from __future__ import annotations

from collections.abc import Iterable

from twostep.kv_cache.block_hash import BlockHash

NULL_BLOCK_ID = 0
"""Stands for positions whose KV is not kept; never handed out, never freed."""


class ReusableBlocks:
    """Free blocks that can still be found, least recently freed first.

    A list that is read from the front. A block that is taken out of the middle leaves its entry
    behind: the last entry of a free block is its place, and those before it are skipped.
    """

    __slots__ = ("_entries", "_is_free", "_left_behind", "_start", "count")

    def __init__(self, num_blocks: int) -> None:
        self.count = 0
        self._entries: list[int] = []
        self._start = 0
        """Entries that were read already."""
        self._is_free = [False] * num_blocks
        """By block: whether it is here."""
        self._left_behind: dict[int, int] = {}
        """{block: its next entries, that many, are to be skipped}"""

    def __contains__(self, block_id: int) -> bool:
        return self._is_free[block_id]

    def append(self, block_ids: list[int]) -> None:
        """Blocks that have just become free, in this order."""
        is_free = self._is_free
        for block_id in block_ids:
            assert not is_free[block_id], f"block {block_id} freed twice"
            is_free[block_id] = True
        self._entries += block_ids
        self.count += len(block_ids)
        if len(self._entries) > 2 * len(is_free):
            # At most every ``num_blocks`` frees, so it costs a constant for each.
            self._entries = self.in_order()
            self._start = 0
            self._left_behind.clear()

    def popleft(self, count: int) -> list[int]:
        """Take the blocks that were free for the longest time."""
        assert count <= self.count, f"{count} blocks wanted, {self.count} are here"
        if self._left_behind:
            taken = self._read_entries(count)
        else:
            taken = self._entries[self._start : self._start + count]
            self._start += count
        is_free = self._is_free
        for block_id in taken:
            is_free[block_id] = False
        self.count -= count
        return taken

    def remove(self, block_id: int) -> None:
        """Take one block out; it is here."""
        self._is_free[block_id] = False
        self._left_behind[block_id] = self._left_behind.get(block_id, 0) + 1
        self.count -= 1

    def in_order(self) -> list[int]:
        """All of them, the next one to take first."""
        entries = self._entries[self._start :]
        if self._left_behind:
            skip = self._left_behind.copy()
            entries = [block_id for block_id in entries if not _skips(skip, block_id)]
        return entries

    def _read_entries(self, count: int) -> list[int]:
        """The next ``count`` blocks that are in their place."""
        taken: list[int] = []
        while len(taken) < count:
            block_id = self._entries[self._start]
            self._start += 1
            if not _skips(self._left_behind, block_id):
                taken.append(block_id)
        return taken


def _skips(left_behind: dict[int, int], block_id: int) -> bool:
    """Whether the block's entry that was just read is an old one; that is counted."""
    times = left_behind.get(block_id)
    if times is None:
        return False
    if times == 1:
        del left_behind[block_id]
    else:
        left_behind[block_id] = times - 1
    return True


class BlockPool:
    """Hands blocks out, takes them back, and keeps the content of free ones for as long as it can.

    Several requests share a block whose content they have in common. A block that nobody holds is
    free, and stays findable by its hash until it is handed out again. Each content is findable in
    one block: a twin that another request computed is not offered.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "the null block and one to use"
        self.num_blocks = num_blocks
        self.unhashed = list(range(num_blocks - 1, NULL_BLOCK_ID, -1))
        """Free, nothing to find in them; the last one is handed out next."""
        self.reusable = ReusableBlocks(num_blocks)
        """Free and findable; handed out when nothing else is left."""
        self.extra_refs: dict[int, int] = {}
        """{block: holders beyond the first}, of shared blocks only."""
        self.cached: dict[BlockHash, int] = {}
        self.hash_of: list[BlockHash | None] = [None] * num_blocks
        """By block: the hash under which it can be found."""
        self.removed: list[BlockHash] | None = None
        """Hashes that stopped being findable, for KV events; None while nobody wants them."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, findable ones included."""
        return len(self.unhashed) + self.reusable.count

    @property
    def num_usable_blocks(self) -> int:
        """All but the null block."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0..1."""
        return 1.0 - (len(self.unhashed) + self.reusable.count) / (self.num_blocks - 1)

    def free_order(self) -> list[int]:
        """Free blocks, from the next one to hand out to the last one."""
        return self.unhashed[::-1] + self.reusable.in_order()

    def num_holders(self, block_id: int) -> int:
        """Holders of a block that is not free."""
        return 1 + self.extra_refs.get(block_id, 0)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take ``count`` blocks for writing; what they held is forgotten. The caller checked."""
        unhashed = self.unhashed
        start = len(unhashed) - count
        if start >= 0:
            taken = unhashed[start:]
            del unhashed[start:]
            taken.reverse()
            return taken
        taken = unhashed[::-1]
        unhashed.clear()
        cached, hash_of = self.cached, self.hash_of
        evicted = self.reusable.popleft(-start)
        if self.removed is not None:
            self.removed += [h for block_id in evicted if (h := hash_of[block_id]) is not None]
        for block_id in evicted:
            del cached[hash_of[block_id]]  # type: ignore[arg-type]  # it was found by this hash
            hash_of[block_id] = None
        return taken + evicted

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks found by their hash."""
        reusable, extra_refs = self.reusable, self.extra_refs
        for block_id in block_ids:
            if block_id in reusable:
                reusable.remove(block_id)
            else:
                extra_refs[block_id] = extra_refs.get(block_id, 0) + 1

    def free_blocks(self, ordered: list[int]) -> None:
        """Drop one holder of each. Free ones with a hash queue at the tail, others in front.

        Requests pass their blocks last one first, so that the head of a prompt, which others
        most likely share, is evicted last.
        """
        if self.extra_refs:
            ordered = self._without_shared(ordered)
        hash_of = self.hash_of
        hashed = [block_id for block_id in ordered if hash_of[block_id] is not None]
        self.reusable.append(hashed)
        if len(hashed) < len(ordered):
            ordered.reverse()
            self.unhashed += [block_id for block_id in ordered if hash_of[block_id] is None]

    def _without_shared(self, ordered: list[int]) -> list[int]:
        """Drop one holder of each block that has several; those that become free are left."""
        extra_refs = self.extra_refs
        free = []
        for block_id in ordered:
            if block_id not in extra_refs:
                free.append(block_id)
            elif extra_refs[block_id] == 1:
                del extra_refs[block_id]
            else:
                extra_refs[block_id] -= 1
        return free

    def cache_blocks(self, block_ids: list[int], hashes: list[BlockHash]) -> list[int]:
        """Let full blocks be found by their hashes; returns those that are no twins."""
        findable = list(map(self.cached.setdefault, hashes, block_ids))
        if findable != block_ids:
            pairs = zip(block_ids, hashes, findable, strict=True)
            kept = [(block_id, h) for block_id, h, found in pairs if found == block_id]
            block_ids = [block_id for block_id, _ in kept]
            hashes = [block_hash for _, block_hash in kept]
        hash_of = self.hash_of
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            hash_of[block_id] = block_hash
        return block_ids

    def evict(self, block_id: int) -> None:
        """Make a block unfindable; its holders keep it."""
        block_hash = self.hash_of[block_id]
        if block_hash is None:
            return
        self.hash_of[block_id] = None
        del self.cached[block_hash]
        if self.removed is not None:
            self.removed.append(block_hash)
        if block_id in self.reusable:
            self.reusable.remove(block_id)
            self.unhashed.append(block_id)

    def evict_all(self) -> None:
        """Make every block unfindable; free ones keep their order."""
        self.cached.clear()
        self.hash_of = [None] * self.num_blocks
        self.unhashed[:0] = reversed(self.reusable.in_order())
        self.reusable = ReusableBlocks(self.num_blocks)
