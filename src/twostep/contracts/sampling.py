"""How a request wants its tokens chosen."""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class RequestOutputKind(enum.IntEnum):
    """What each ``RequestOutput`` of a request carries."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """Only what is new since the last output."""
    FINAL_ONLY = 2
    """Nothing until the request has finished."""


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long a model may reason. Made by who knows the form of its reasoning."""

    max_tokens: int
    """Between the tags; then the tag that ends reasoning is forced."""
    start: str
    """The tag that opens reasoning."""
    end: str
    end_token_ids: tuple[int, ...]
    """The ids that spell ``end``."""
    is_thinking: bool = False
    """Whether the prompt has opened it."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the generated text; exactly one of the first five fields is set.

    None of them may be set beside ``thinking``.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    """What the whole text matches, in the syntax of Rust's regex crate."""
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    """Lark as llguidance reads it, or GBNF (with a rule ``root ::=``)."""
    json_object: bool | None = None
    strict: bool = True
    """Of a JSON schema: refuse what cannot be kept; False leaves it out, with a line in the log."""
    disable_any_whitespace: bool = False
    """JSON in its most compact form."""
    whitespace_pattern: str | None = None
    """A regex of the white space between the parts of JSON, instead of the default."""
    thinking: ThinkingBudget | None = None
    """A bound on the reasoning that the text, constrained as a whole, may have in it."""


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ends a request whose last tokens are the same pattern again and again."""

    max_pattern_size: int
    """Longest pattern looked for, in tokens."""
    min_pattern_size: int = 1
    min_count: int = 2
    """Times in a row that a pattern must occur."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, dict=False):
    """Sampling parameters with vLLM's names and defaults. ``frontend`` validates them.

    Treated as immutable once a request was admitted. ``temperature=0`` is greedy;
    ``top_k`` of 0 or -1 is off; ``logprobs=0`` returns the chosen token's only;
    ``seed=None`` draws a seed at admission.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    """Filled by the front end from ``bad_words``: each word as the ids that spell it."""
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Tokens whose log-probabilities are told beside the chosen one's, instead of the likeliest."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    priority: int = 0

    def clone(self) -> SamplingParams:
        """A copy whose fields can be set without touching this one."""
        return msgspec.structs.replace(self)
