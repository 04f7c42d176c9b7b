"""Configurations that can never work are refused at start, with field, value and cure."""

from __future__ import annotations

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.errors import UsageError


def check_config(config: SchedulerConfig, cache: CacheConfig) -> None:
    """Raise UsageError if a scheduler with these could serve nothing, or could get stuck."""
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
        if getattr(config, name) < 1:
            raise UsageError(f"{name} is {getattr(config, name)}: set it to 1 or more")
    if cache.num_blocks < 2 or cache.block_size < 1:
        raise UsageError(
            f"a KV cache of {cache.num_blocks} blocks of {cache.block_size} tokens cannot hold "
            f"anything: give it at least 2 blocks of 1 token"
        )
    if config.long_prefill_token_threshold < 0:
        raise UsageError(
            f"long_prefill_token_threshold is {config.long_prefill_token_threshold}: set it to the "
            f"most tokens of one prompt in a step, or to 0 for no cap"
        )
    if config.prefill_burst_tokens < 0:
        raise UsageError(
            f"prefill_burst_tokens is {config.prefill_burst_tokens}: set it to the most tokens in "
            f"a row for which a crowd of newcomers goes first, or to 0 for never"
        )
    if config.crowd_step_tokens < 0:
        raise UsageError(
            f"crowd_step_tokens is {config.crowd_step_tokens}: set it to the most tokens of a step "
            f"in which newcomers go first, or to 0 for as many as in any other"
        )
    if not 0 <= cache.watermark < 1:
        raise UsageError(
            f"watermark is {cache.watermark:g}: set it to the share of the KV cache, from 0 to "
            f"below 1, that stays free when a request starts"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
        raise UsageError(
            f"without chunked prefill a whole prompt must fit into one step: raise "
            f"max_num_batched_tokens from {config.max_num_batched_tokens} to max_model_len "
            f"({config.max_model_len}) or allow chunked prefill"
        )
