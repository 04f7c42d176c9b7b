"""A router that follows KV events: it must know at any time what can be found."""

from __future__ import annotations

from collections.abc import Sequence, Set

from twostep.contracts.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from twostep.sim.streams import ContentHashes
from twostep.sim.violation import Violation


class EventMirror:
    """The hashes that can be found, by events alone."""

    def __init__(self, hashes: ContentHashes) -> None:
        self._hashes = hashes
        self._stored: set[bytes] = set()

    def apply(self, events: Sequence[KVCacheEvent]) -> None:
        """Take events in their order."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._stored -= set(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._stored.clear()

    def compare(self, findable: Set[bytes]) -> None:
        """I7: after all news were taken, both sides know the same."""
        if self._stored != findable:
            missing, extra = findable - self._stored, self._stored - findable
            raise Violation(
                "I7", f"by its events {len(missing)} hashes are missing and {len(extra)} too many"
            )

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        parent = event.parent_block_hash
        for index, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[index * size : (index + 1) * size]
            if self._hashes.compute(parent, tokens, event.cache_salt) != block_hash:
                raise Violation("I7", "a stored block does not have the hash that is told")
            parent = block_hash
            self._stored.add(block_hash)
