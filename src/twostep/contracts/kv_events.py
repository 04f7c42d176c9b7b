"""What changes in the prefix cache, for routers that send a request to where its prefix lies."""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Full blocks can be found from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Hash of the block before the first of these; None at the start of a sequence."""
    token_ids: list[int]
    """The tokens of all these blocks, one block after the other."""
    block_size: int
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that cannot be found any more."""

    block_hashes: list[bytes]


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The whole prefix cache was forgotten."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
