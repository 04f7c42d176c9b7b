"""How much one request may ask for. Every refusal names the limit it met."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
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
    max_logprob_token_ids: int = 128
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
    max_schema_bytes: int = 256 * 1024
    """A JSON schema, or all choices together."""
    max_schema_depth: int = 64
    """Levels of a JSON schema's document."""
    max_schema_properties: int = 512
    """Properties of one object of a JSON schema."""
    max_regex_bytes: int = 8 * 1024
    max_grammar_bytes: int = 64 * 1024
    max_choices: int = 1024
    max_terminal_names: int = 10_000
    """Names in a terminal of a grammar, those in their definitions counted."""
    max_grammar_compile_fuel: int = 1_000_000
    """Work of compiling a grammar, in llguidance's lexer units: some 20 ms."""
    max_grammar_step_fuel: int = 200_000
    """Work of one mask, in the same units: some 14 ms; a request beyond it ends with an error."""
    max_grammar_states: int = 50_000
    """Lexer states of one request, 1 to 2 KB each."""
    max_grammar_symbols: int = 200_000
    """Symbols in the rules of a compiled grammar."""
    max_cached_grammars: int = 256
    max_grammar_compile_seconds: float = 10.0
    """How long a request waits for the check of its grammar."""
