"""The ways to write calls, and the tags around reasoning, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twostep.server.parsers.argument_types import ParameterTypes
from twostep.server.parsers.function_tags import FUNCTION_START, FunctionTagsReader
from twostep.server.parsers.json_block import JsonBlockReader
from twostep.server.parsers.mistral import MistralReader
from twostep.server.parsers.named_arguments import ARGS, CALL_ID, TOOL_CALLS
from twostep.server.parsers.output_parser import CallReader, ThinkTags, ToolSyntax

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


REASONING_TAGS = {
    "think": ThinkTags("<think>", "</think>"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
}
"""By the format's name."""


def make_syntax(tool_format: str, tools: Sequence[Mapping[str, Any]]) -> ToolSyntax:
    """The syntax of a format; ``tools`` as in the request (``{"type": "function", ...}``)."""
    match tool_format:
        case "hermes":
            return ToolSyntax([TOOL_CALL], [TOOL_CALL_END], "", _block_reader(tools))
        case "qwen3_coder":
            return ToolSyntax(
                [TOOL_CALL, FUNCTION_START], [TOOL_CALL_END], "", _block_reader(tools)
            )
        case "llama3_json":
            return ToolSyntax([PYTHON_TAG], [], "{", _llama_reader)
        case "mistral" | "mistral_args":
            return ToolSyntax([TOOL_CALLS], [ARGS, CALL_ID], "", lambda _: MistralReader())
        case "json":
            return ToolSyntax([], [], "[{", lambda _: JsonBlockReader(must_look_like_call=True))
    raise AssertionError(tool_format)


def _block_reader(tools: Sequence[Mapping[str, Any]]) -> Callable[[str], CallReader]:
    """Objects or function tags in ``<tool_call>``: models of one family write both."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}

    def read_function() -> CallReader:
        return FunctionTagsReader(lambda name: ParameterTypes(schemas.get(name)))

    def open_block(marker: str) -> CallReader:
        if marker == FUNCTION_START:
            return read_function()
        return JsonBlockReader(
            opening=[TOOL_CALL],
            closing=[TOOL_CALL_END],
            between=",;}",
            inner=(FUNCTION_START, read_function),
        )

    return open_block


def _llama_reader(marker: str) -> CallReader:
    return JsonBlockReader(between=";,", opening=[PYTHON_TAG], must_look_like_call=not marker)
