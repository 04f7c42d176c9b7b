"""How much one request may ask for. Every refusal names the limit it met."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds on what one request may bring; checked before it enters the engine core."""

    max_n: int = 128
    """Sequences of one request."""
    max_stop_strings: int = 64
    """Editors send twenty and more."""
    max_stop_string_bytes: int = 256
    """Bytes of one stop string in UTF-8."""
    max_stop_token_ids: int = 128
    max_bad_words: int = 128
    max_bad_words_tokens: int = 1024
    """Tokens of all bad words together, every spelling counted."""
    max_allowed_token_ids: int = 1024
    max_logit_bias: int = 300
    """Entries of ``logit_bias``."""
    max_logprobs: int = 20
    """Top candidates at one position; -1 lifts the bound (then ``logprobs=-1`` means all)."""
    max_repetition_pattern_size: int = 512
    """Tokens of the longest pattern that ``repetition_detection`` looks for."""
    max_cache_salt_chars: int = 128
    max_prompt_chars_per_token: int = 256
    """A text longer than this times ``max_model_len`` is refused without tokenising it."""
    max_messages: int = 4096
    """Messages of one conversation."""
    max_template_output_bytes: int = 2 * 1024 * 1024
    """Most text a chat template may make, and the largest value it may hold, in characters."""
    max_template_operations: int = 1_000_000
    """Loop turns, calls, filters and arithmetic of one rendering."""
    max_template_seconds: float = 1.0
    """Time of one rendering."""
