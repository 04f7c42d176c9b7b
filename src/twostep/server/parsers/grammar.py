"""Grammars that make a model call functions, in its own form and by their schemas.

Lark as llguidance reads it (its docs, ``syntax.md``): ``%json`` inlines a schema, ``suffix`` ends a
free text at its first occurrence, ``<[id]>`` is a special token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twostep.contracts.sampling import StructuredOutputsParams
from twostep.server.parsers.argument_types import STRING_ONLY, ParameterTypes
from twostep.server.parsers.formats import Formats, ToolChoice
from twostep.server.parsers.function_tags import FUNCTION_START
from twostep.server.parsers.named_arguments import ARGS, TOOL_CALLS
from twostep.server.parsers.syntaxes import PYTHON_TAG, REASONING_TAGS, TOOL_CALL, TOOL_CALL_END

_ANY_TEXT = "/(?s:.*)/"
_SPACE = r"/\s{0,4}/"
# One spelling of white space, the one of json.dumps: no model can fill its answer with it.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def output_grammar(
    formats: Formats,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    answer: StructuredOutputsParams | None = None,
    *,
    starts_in_reasoning: bool = False,
    parallel_tool_calls: bool = True,
    special_tokens: Mapping[str, int] | None = None,
) -> StructuredOutputsParams | None:
    """The constraint on a whole output: reasoning, and then calls or an answer.

    ``required`` and a named function demand calls, whatever ``answer`` says. With ``auto`` the
    model may call or answer: calls are held to their schemas if ``answer`` is given or a function
    is ``strict``. ``answer`` is the request's own constraint; a ``grammar`` in it is the user's,
    and is used as it is. None: nothing is constrained. Reasoning stays free.

    ``special_tokens``: ids of markers that are special tokens; the others are spelled as text.
    """
    tool_format = formats.format_for(tools, tool_choice)
    is_demanded = tool_format is not None and tool_choice != "auto"
    if not is_demanded and answer is not None:
        if answer.grammar is not None or (tool_format is None and not formats.reasoning_format):
            return answer
    elif not is_demanded and (tool_format is None or not any(map(_is_strict, tools))):
        return None
    lark = _Lark(tool_format or "json", special_tokens or {})
    outputs = []
    if tool_format is not None:
        if isinstance(tool_choice, Mapping):
            name = tool_choice["function"]["name"]
            tools = [tool for tool in tools if tool["function"]["name"] == name]
        is_named = isinstance(tool_choice, Mapping)
        lark.add_calls(
            tools,
            many=parallel_tool_calls and not is_named,
            beside_answer=answer is not None and not is_demanded,
        )
        outputs.append("calls")
    if answer is not None and not is_demanded:
        lark.add_answer(answer)
        outputs.append("answer")
    if is_demanded or answer is not None:
        lark.rule("output", " | ".join(outputs))
        lark.start_at_once(formats.reasoning_format, starts_in_reasoning)
    else:
        lark.start_freely()
    return StructuredOutputsParams(grammar=lark.text())


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _text(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; without one it has none."""
    schema = tool["function"].get("parameters")
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **schema}


class _Lark:
    """Rules of a grammar; ``calls`` is the whole section of calls."""

    def __init__(self, tool_format: str, special_tokens: Mapping[str, int]) -> None:
        self._format = tool_format
        self._special = special_tokens
        self._rules: list[str] = []

    def text(self) -> str:
        return "\n".join(["%llguidance {}", *self._rules, ""])

    def rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def add_answer(self, params: StructuredOutputsParams) -> None:
        """``answer``: an answer as the request wants it."""
        if params.regex is not None:
            pattern = params.regex.replace("/", "\\/")
            self.rule("answer", f"/(?:{pattern})/")
        elif params.choice is not None:
            self.rule("answer", " | ".join(map(_text, params.choice)))
        else:
            schema: Any = {"type": "object"} if params.json is None else params.json
            if isinstance(schema, str):
                schema = json.loads(schema)
            self.rule("answer", f"%json {json.dumps(schema)}")

    def _marker(self, marker: str) -> str:
        token = self._special.get(marker)
        return _text(marker) if token is None else f"<[{token}]>"

    # ---------------------------------------------------------------- where calls may begin

    def start_at_once(self, reasoning_format: str | None, starts_in_reasoning: bool) -> None:
        """The output, or reasoning and then the output."""
        if reasoning_format is None:
            self.rule("start", "output")
            return
        tags = REASONING_TAGS[reasoning_format]
        if tags.end in self._special:
            self.rule("thoughts", f"{_ANY_TEXT} {self._marker(tags.end)}")
        else:
            self.rule(f"thoughts[suffix={_text(tags.end)}]", _ANY_TEXT)
        thought = f"thoughts {_SPACE} output"
        if starts_in_reasoning:
            self.rule("start", thought)
        else:
            self.rule("start", f"output | {_SPACE} {self._marker(tags.start)} {thought}")

    def start_freely(self) -> None:
        """Text, with or without calls in it."""
        opening = {
            "hermes": TOOL_CALL,
            "qwen3_coder": TOOL_CALL,
            "mistral": TOOL_CALLS,
            "mistral_args": TOOL_CALLS,
        }.get(self._format)
        if opening is None:
            # Calls have no marker: an answer that begins like one is one.
            firsts = "[^{\\[]" if self._format == "json" else "[^{]"
            self.rule("start", f"(/{firsts}(?s:.*)/)? | calls")
        elif opening in self._special:
            self.rule("start", f"{_ANY_TEXT} (calls {_ANY_TEXT})?")
        else:
            # The marker that ends the text is the one that the section begins with.
            self.rule("start", f"(free_text section)* {_ANY_TEXT}")
            self.rule(f"free_text[suffix={_text(opening)}]", _ANY_TEXT)

    # ---------------------------------------------------------------- calls

    def add_calls(
        self, tools: Sequence[Mapping[str, Any]], *, many: bool, beside_answer: bool
    ) -> None:
        """``calls``: one or more; ``section``: one of them without its opening marker.

        ``beside_answer``: an answer that may be a JSON object stands beside them.
        """
        names = [f"f{i}" for i in range(len(tools))]
        for name, tool in zip(names, tools, strict=True):
            self._add_function(name, tool)
        any_call = " | ".join(names)
        self.rule("call", any_call)
        more = {"mistral": ", ", "json": ", ", "llama3_json": "; "}.get(self._format, "")
        repeated = f"call ({_text(more)} call)*" if many and more else "call"
        match self._format:
            case "hermes" | "qwen3_coder":
                end = self._marker(TOOL_CALL_END)
                self.rule("section", f'"\\n" call "\\n" {end}')
                block = f"{self._marker(TOOL_CALL)} section"
                self.rule("calls", f'{block} ("\\n" {block})*' if many else block)
            case "mistral_args":
                self.rule("section", "call")
                block = f"{self._marker(TOOL_CALLS)} section"
                self.rule("calls", f"({block})+" if many else block)
            case "mistral":
                self.rule("section", f'" "? "[" {repeated} "]"')
                self.rule("calls", f"{self._marker(TOOL_CALLS)} section")
            case "llama3_json":
                # Without the tag, llguidance could not tell an object from a call.
                tag = self._marker(PYTHON_TAG)
                self.rule("calls", f"{tag if beside_answer else f'({tag})?'} {repeated}")
            case _:
                self.rule("calls", f'"[" {repeated} "]"')

    def _add_function(self, rule: str, tool: Mapping[str, Any]) -> None:
        name = tool["function"]["name"]
        if self._format == "qwen3_coder":
            self._add_tagged_function(rule, tool)
            return
        arguments = f"%json {self._schema(_parameters(tool), strict=_is_strict(tool))}"
        if self._format == "mistral_args":
            self.rule(rule, f"{_text(name)} {self._marker(ARGS)} {arguments}")
            return
        key = "parameters" if self._format == "llama3_json" else "arguments"
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        self.rule(rule, f'{_text(head)} {arguments} "}}"')

    def _add_tagged_function(self, rule: str, tool: Mapping[str, Any]) -> None:
        """Parameters in the schema's order, each as JSON or as free text by its type."""
        schema = _parameters(tool)
        types = ParameterTypes(schema)
        required = schema.get("required") or []
        parts = []
        for i, (name, value) in enumerate(schema.get("properties", {}).items()):
            parameter = f"{rule}_p{i}"
            self._add_tagged_value(f"{parameter}_value", schema, value, types.of(name), tool)
            self.rule(parameter, f"{_text(f'<parameter={name}>' + chr(10))} {parameter}_value")
            parts.append(parameter if name in required else f"({parameter})?")
        head = _text(f"{FUNCTION_START}{tool['function']['name']}>\n")
        self.rule(rule, " ".join([head, *parts, '"</function>"']))

    def _add_tagged_value(
        self,
        rule: str,
        root: Mapping[str, Any],
        schema: Any,
        types: frozenset[str],
        tool: Mapping[str, Any],
    ) -> None:
        end = "\n</parameter>\n"
        if types == STRING_ONLY and isinstance(schema, Mapping) and schema.get("enum"):
            words = " | ".join(_text(word) for word in schema["enum"])
            self.rule(rule, f"({words}) {_text(end)}")
        elif "string" in types:
            self.rule(f"{rule}[suffix={_text(end)}]", _ANY_TEXT)
        else:
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            document = self._schema({**shared, **schema}, strict=_is_strict(tool))
            self.rule(rule, f"%json {document} {_text(end)}")

    @staticmethod
    def _schema(schema: Mapping[str, Any], *, strict: bool) -> str:
        """For functions that are not strict, keywords that cannot be kept are left out."""
        return json.dumps({**schema, "x-guidance": {**_COMPACT, "lenient": not strict}})
