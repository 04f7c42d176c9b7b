"""Block hashes: what a full block of KV depends on, in 32 bytes.

A block's KV depends on its own tokens and on everything before them, so hashes are chained:
``H_i = sha256(H_{i-1} | token ids | extra keys)``. The encoding is canonical (32-bit little-endian
ids, length-prefixed UTF-8 keys): equal in every process and on every machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

BlockHash = bytes

NONE_HASH: BlockHash = sha256(b"twostep: parent of the first block").digest()
"""Parent of block 0."""

_TOKEN_BYTES = 4


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Token ids as 32-bit numbers: a long prompt is one object, not one for each token."""
    ids = array("I", token_ids)
    assert ids.itemsize == _TOKEN_BYTES
    return ids


def hash_block_tokens(
    parent: BlockHash | None, token_ids: Sequence[int], extra_keys: Sequence[str] = ()
) -> BlockHash:
    """Hash of one full block. ``parent`` is the hash of the block before, None for the first."""
    data = (parent or NONE_HASH) + _encode_tokens(token_array(token_ids))
    return sha256(data + _encode_keys(extra_keys)).digest()


def extend_block_hashes(
    hashes: list[BlockHash],
    token_ids: array[int],
    block_size: int,
    cache_salt: str | None = None,
) -> None:
    """Append to ``hashes`` one hash for each full block of ``token_ids`` that has none yet.

    ``token_ids``: a token array, see ``token_array``.
    ``cache_salt`` enters block 0 only; through the parent it changes the whole chain.
    """
    first = len(hashes)
    num_full = len(token_ids) // block_size
    if first >= num_full:
        return
    data = _encode_tokens(token_ids[first * block_size : num_full * block_size])
    width = block_size * _TOKEN_BYTES
    parent = hashes[-1] if hashes else NONE_HASH
    salt = _encode_keys((cache_salt,)) if cache_salt is not None and first == 0 else b""
    for start in range(0, len(data), width):
        parent = sha256(parent + data[start : start + width] + salt).digest()
        salt = b""
        hashes.append(parent)


def _encode_tokens(ids: array[int]) -> bytes:
    if sys.byteorder == "big":
        ids = array(ids.typecode, ids)
        ids.byteswap()
    return ids.tobytes()


def _encode_keys(keys: Sequence[str]) -> bytes:
    parts = []
    for key in keys:
        text = key.encode()
        parts.append(len(text).to_bytes(4, "little") + text)
    return b"".join(parts)
