"""How many KV blocks to reserve: what is needed, as far as it fits, with the reason in words."""

from __future__ import annotations

import msgspec

from twostep.contracts.errors import OutOfMemoryError


class KVCacheSizing(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the KV cache and why it is that."""

    num_blocks: int
    """The null block included."""
    block_size: int
    """Tokens."""
    block_bytes: int
    """Bytes of one block over all layers, keys and values."""
    max_concurrency: float
    """Requests of ``max_model_len`` tokens that fit at once."""
    reason: str
    """One line for the boot table."""

    @property
    def num_tokens(self) -> int:
        """Tokens the usable blocks hold."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def total_bytes(self) -> int:
        """Bytes to reserve."""
        return self.num_blocks * self.block_bytes


def kv_block_bytes(
    *, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int
) -> int:
    """Bytes of one block: keys and values of ``block_size`` tokens in every layer."""
    return block_size * num_layers * num_kv_heads * 2 * head_dim * dtype_bytes


def blocks_per_request(
    *,
    block_size: int,
    max_model_len: int,
    sliding_window: int | None = None,
    max_in_flight_tokens: int = 0,
) -> int:
    """Most blocks that one request holds at a time; fewer if every layer has a window."""
    blocks = -(-max_model_len // block_size)
    if sliding_window is None:
        return blocks
    return min(blocks, -(-(sliding_window - 1 + max_in_flight_tokens) // block_size) + 1)


def size_kv_cache(
    *,
    block_bytes: int,
    block_size: int,
    available_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    requested_bytes: int | None = None,
    sliding_window: int | None = None,
    max_in_flight_tokens: int = 0,
) -> KVCacheSizing:
    """Blocks for ``max_num_seqs`` requests of ``max_model_len`` tokens, or as many as fit.

    ``available_bytes``: memory that may be used. ``requested_bytes``: the user's own size, which
    replaces the need. ``max_in_flight_tokens``: see KVCacheManager; matters with a window only.
    Raises OutOfMemoryError if not even one request of ``max_model_len`` fits.
    """
    per_request = blocks_per_request(
        block_size=block_size,
        max_model_len=max_model_len,
        sliding_window=sliding_window,
        max_in_flight_tokens=max_in_flight_tokens,
    )
    fitting = available_bytes // block_bytes
    if requested_bytes is not None:
        if requested_bytes > available_bytes:
            raise OutOfMemoryError(
                f"the KV cache should take {_size(requested_bytes)} but {_size(available_bytes)} "
                f"are free: ask for less"
            )
        num_blocks = requested_bytes // block_bytes
        reason = f"{_size(requested_bytes)} as requested"
    else:
        num_blocks = min(per_request * max_num_seqs + 1, fitting)
        reason = _reason(num_blocks < fitting, max_num_seqs, max_model_len, available_bytes)
    if num_blocks < per_request + 1:
        raise _too_small(num_blocks, per_request, block_bytes, block_size, max_model_len)
    return KVCacheSizing(
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=block_bytes,
        max_concurrency=(num_blocks - 1) / per_request,
        reason=reason,
    )


def _reason(need_fits: bool, max_num_seqs: int, max_model_len: int, available_bytes: int) -> str:
    if need_fits:
        requests = "1 request" if max_num_seqs == 1 else f"{max_num_seqs} requests"
        return f"{requests} of {max_model_len} tokens, all that can be needed"
    return f"all that fits in {_size(available_bytes)}"


def _too_small(
    num_blocks: int, per_request: int, block_bytes: int, block_size: int, max_model_len: int
) -> OutOfMemoryError:
    longest = max(0, num_blocks - 1) * block_size
    cure = f"set --max-model-len {longest} or less" if longest else "free some memory"
    return OutOfMemoryError(
        f"one request of {max_model_len} tokens needs {_size((per_request + 1) * block_bytes)} of "
        f"KV cache but only {_size(num_blocks * block_bytes)} can be had: {cure}"
    )


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
