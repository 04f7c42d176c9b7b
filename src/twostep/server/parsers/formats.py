"""Which forms of tool calls and reasoning a model uses, and the parser of a choice's output."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from twostep.contracts.errors import UsageError
from twostep.server.parsers.events import CallIds
from twostep.server.parsers.output_parser import OutputParser, ThinkTags
from twostep.server.parsers.syntaxes import REASONING_TAGS, make_syntax

ToolChoice = Literal["none", "auto", "required"] | Mapping[str, Any]
"""As in the request; a mapping names the function: ``{"type": "function", "function": {...}}``."""

TOOL_PARSERS = {
    "hermes": "hermes",
    "json": "json",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "mistral": "mistral",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
}
"""Names of ``--tool-call-parser``, to formats."""

REASONING_PARSERS = {
    "deepseek_r1": "think",
    "glm45": "think",
    "mistral": "mistral",
    "qwen3": "think",
    "seed_oss": "seed_oss",
    "think": "think",
}
"""Names of ``--reasoning-parser``, to formats."""

_FOREIGN_TOOLS = {
    "<arg_key>": "GLM's argument tags",
    "<｜tool": "DeepSeek's tool tokens",
    "<|tool_calls_section_begin|>": "Kimi's tool tokens",
    "<|channel|>": "harmony channels",
    "<start_function_call>": "FunctionGemma's tags",
}


class Formats(msgspec.Struct, frozen=True, kw_only=True):
    """The forms of one model's output."""

    tool_format: str | None
    """hermes, qwen3_coder, llama3_json, mistral (an array), mistral_args (name[ARGS]) or json.
    None: calls are not looked for, unless a request demands one; then it is the ``json`` form."""
    tool_reason: str
    """Why that one, for the log and ``/server_info``."""
    reasoning_format: str | None
    """think, mistral or seed_oss; None: reasoning is text like any other."""
    reasoning_reason: str
    always_reasons: bool = False
    """Every answer starts with reasoning, tag or not."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether markers may be special tokens: ``skip_special_tokens`` must be off then."""
        return self.tool_format is not None or self.reasoning_format is not None

    @property
    def reasoning_tags(self) -> ThinkTags | None:
        """What surrounds reasoning; None: it is text like any other."""
        return None if self.reasoning_format is None else REASONING_TAGS[self.reasoning_format]

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the answer to this prompt starts inside of a think block."""
        if self.reasoning_format is None:
            return False
        if self.always_reasons:
            return True
        return prompt.rstrip().endswith(REASONING_TAGS[self.reasoning_format].start)

    def new_call_id(self) -> str:
        """An id for a call, in the form that the model's template takes back."""
        if self.tool_format in ("mistral", "mistral_args"):
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def format_for(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> str | None:
        """The form that calls have in the answer to such a request; None: there are none."""
        if not tools or choice == "none":
            return None
        if self.tool_format is None and choice != "auto":
            return "json"
        return self.tool_format

    def make(
        self,
        tools: Sequence[Mapping[str, Any]],
        tool_choice: ToolChoice,
        *,
        starts_in_reasoning: bool,
        call_ids: CallIds,
        parallel_tool_calls: bool = True,
    ) -> OutputParser:
        """A parser for one choice. ``tools`` as in the request, checked; empty if it has none."""
        tool_format = self.format_for(tools, tool_choice)
        return OutputParser(
            tags=REASONING_TAGS[self.reasoning_format] if self.reasoning_format else None,
            tools=make_syntax(tool_format, tools) if tool_format else None,
            starts_in_reasoning=starts_in_reasoning,
            call_ids=call_ids,
            parallel_tool_calls=parallel_tool_calls,
        )


_ALPHANUMERIC = string.ascii_letters + string.digits


def choose_formats(
    chat_template: str | None,
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> Formats:
    """Find the forms by the markers that a chat template mentions.

    The parser names are those of the flags: None or ``auto`` looks at the template, ``none`` turns
    the format off. Raises UsageError for a name that there is not.
    """
    template = chat_template or ""
    tool_format, tool_reason = _choose(
        tool_call_parser, "--tool-call-parser", TOOL_PARSERS, _find_tools(template)
    )
    if tool_format == "mistral" and "[ARGS]" in template:
        tool_format = "mistral_args"
    reasoning_format, reasoning_reason = _choose(
        reasoning_parser, "--reasoning-parser", REASONING_PARSERS, _find_reasoning(template)
    )
    return Formats(
        tool_format=tool_format,
        tool_reason=tool_reason,
        reasoning_format=reasoning_format,
        reasoning_reason=reasoning_reason,
        always_reasons=reasoning_parser == "deepseek_r1",
    )


def _choose(
    name: str | None, flag: str, known: Mapping[str, str], found: tuple[str | None, str]
) -> tuple[str | None, str]:
    if name is None or name == "auto":
        return found
    if name == "none":
        return None, f"{flag} none"
    if name not in known:
        names = ", ".join(["auto", "none", *sorted(known)])
        raise UsageError(f"there is no parser {name!r}: {flag} takes one of {names}")
    return known[name], f"{flag} {name}"


def _find_tools(template: str) -> tuple[str | None, str]:
    if not template:
        return None, "there is no chat template"
    for marker, what in _FOREIGN_TOOLS.items():
        if marker in template:
            return None, f"the chat template uses {what}, for which there is no parser yet"
    if "[TOOL_CALLS]" in template:
        return "mistral", "the chat template mentions [TOOL_CALLS]"
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder", "the chat template mentions <function= and <parameter="
    if "<tool_call>" in template:
        return "hermes", "the chat template mentions <tool_call>"
    if "<|python_tag|>" in template:
        return "llama3_json", "the chat template mentions <|python_tag|>"
    if '{"name": function name, "parameters"' in template:
        return "llama3_json", "the chat template asks for JSON calls in Llama 3's form"
    return None, "the chat template mentions no form of tool calls that is known here"


def _find_reasoning(template: str) -> tuple[str | None, str]:
    for name, tags in REASONING_TAGS.items():
        if tags.end in template:
            return name, f"the chat template mentions {tags.end}"
        if tags.start in template:
            return name, f"the chat template mentions {tags.start}"
    return None, "the chat template mentions no think tags"
