"""Forms are found by the chat template's markers, unless a flag names them."""

from __future__ import annotations

import pytest

from twostep.contracts.errors import UsageError
from twostep.server.parsers.formats import REASONING_PARSERS, TOOL_PARSERS, choose_formats

TEMPLATES = [
    ("return a json object within <tool_call></tool_call>", "hermes", None),
    ("<tool_call></tool_call> {{ content.split('</think>') }}", "hermes", "think"),
    ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3_coder", None),
    ("{{- '<|python_tag|>' }}", "llama3_json", None),
    ('respond with {"name": function name, "parameters": dictionary}', "llama3_json", None),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK][/THINK]", "mistral", "mistral"),
    ("[TOOL_CALLS]name[ARGS]{}", "mistral_args", None),
    ("{{ '<think>\\n' }}", None, "think"),
    ("<tool_call>{name}\n<arg_key>{k}</arg_key>", None, None),
    ("<｜tool▁calls▁begin｜>", None, None),
    ("<|im_start|>{{ message.content }}", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_found_in_the_template(template: str, tools: str | None, reasoning: str | None) -> None:
    formats = choose_formats(template)
    assert (formats.tool_format, formats.reasoning_format) == (tools, reasoning)
    assert "chat template" in formats.tool_reason
    assert formats == choose_formats(template, tool_call_parser="auto", reasoning_parser="auto")


def test_a_flag_wins_over_the_template() -> None:
    formats = choose_formats("<tool_call>", tool_call_parser="mistral", reasoning_parser="qwen3")
    assert (formats.tool_format, formats.reasoning_format) == ("mistral", "think")
    assert formats.tool_reason == "--tool-call-parser mistral"
    off = choose_formats("<tool_call><think>", tool_call_parser="none", reasoning_parser="none")
    assert off.tool_format is None
    assert off.reasoning_format is None
    assert not off.needs_special_tokens


def test_an_unknown_parser_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError, match="--tool-call-parser takes one of auto, none, hermes"):
        choose_formats(None, tool_call_parser="hermez")
    with pytest.raises(UsageError, match="--reasoning-parser takes one of"):
        choose_formats(None, reasoning_parser="hermes")


def test_every_named_parser_parses() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for tool_name in TOOL_PARSERS:
        for reasoning_name in REASONING_PARSERS:
            formats = choose_formats(
                None, tool_call_parser=tool_name, reasoning_parser=reasoning_name
            )
            parser = formats.make(tools, "auto", starts_in_reasoning=False, call_ids=lambda: "")
            assert parser.feed("x")
