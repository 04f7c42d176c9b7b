"""What a start found and chose, for people and for ``--json``."""

from __future__ import annotations

import msgspec

from twostep.kv_cache.sizing import KVCacheSizing


class BootReport(msgspec.Struct, frozen=True, kw_only=True):
    """The boot table."""

    model: str
    architecture: str
    weight_bytes: int
    """Packed, in memory."""
    kv_dtype: str
    kv_sizing: KVCacheSizing
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    crowd_step_tokens: int = 0
    """Of a step in which newcomers go first; 0: as in any other."""
    async_scheduling: bool
    pooling: str | None = None
    """How embeddings are made; None: text is generated."""
    num_threads: int
    isa: str
    isa_reason: str
    seconds: dict[str, float]
    """By phase."""

    @property
    def largest_step(self) -> int:
        """Most tokens that any step has."""
        return max(self.max_num_batched_tokens, self.crowd_step_tokens)

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) lines."""
        kv = self.kv_sizing
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.seconds.items())
        pooling = [] if self.pooling is None else [("embeddings", self.pooling)]
        return [
            ("model", f"{self.model} ({self.architecture})"),
            *pooling,
            ("weights", f"{_mib(self.weight_bytes)} packed"),
            (
                "kv cache",
                f"{_mib(kv.total_bytes)} {self.kv_dtype}, used as it fills: "
                f"{kv.num_tokens:,} tokens, {kv.max_concurrency:.1f} requests of "
                f"{self.max_model_len:,} ({kv.reason})",
            ),
            (
                "step",
                f"up to {self.max_num_batched_tokens} tokens of {self.max_num_seqs} requests, "
                + (f"{self.crowd_step_tokens} of many prompts, " if self.crowd_step_tokens else "")
                + ("two steps in flight" if self.async_scheduling else "one step at a time"),
            ),
            ("kernels", f"{self.isa} ({self.isa_reason}), {self.num_threads} threads"),
            ("seconds", f"{sum(self.seconds.values()):.2f} = {phases}"),
        ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
