"""Request bodies that are right, field by field, and values that are mostly wrong."""

from __future__ import annotations

import random
from typing import Any

HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2.0,
    2.5,
    -0.0,
    1e308,
    2**31,
    2**63,
    -(2**63),
    10**400,
    "",
    "a",
    "5",
    "x" * 3000,
    "\0",
    "</s><|im_end|>",
    "日本\U0001f336",
    [],
    [[]],
    [None],
    [0],
    [-1],
    [2**64],
    ["a", 1],
    [{}],
    {},
    {"a": 1},
    {"type": "json_schema"},
    {"0": 1},
    {"-1": 1e308},
]
PLAIN: dict[str, list[Any]] = {
    "n": [1, 2],
    "temperature": [0, 0.5, 1],
    "top_p": [0.5],
    "top_k": [-1, 0, 5],
    "seed": [1],
    "stop": ["a", ["b"]],
    "max_tokens": [1, 3],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "logit_bias": [{"5": 1}],
    "min_tokens": [1],
    "ignore_eos": [True],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "structured_outputs": [{"choice": ["a"]}, {"regex": "a"}, {"json": {}}],
    "truncate_prompt_tokens": [5, -1],
    "bad_words": [["a"]],
    "allowed_token_ids": [[5, 6]],
    "stop_token_ids": [[5]],
    "repetition_detection": [{"max_pattern_size": 3}],
    "prompt_logprobs": [1],
    "priority": [0],
    "cache_salt": ["s"],
    "return_token_ids": [True],
    "skip_special_tokens": [False],
    "request_id": ["r"],
    "model": ["tiny"],
}
CHAT: dict[str, list[Any]] = {
    **PLAIN,
    "messages": [[{"role": "user", "content": "Hi"}]],
    "logprobs": [True],
    "top_logprobs": [2],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {}}}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": [{"a": 1}],
    "continue_final_message": [True],
    "echo": [True],
    "reasoning_effort": ["low"],
    "max_completion_tokens": [3],
}
COMPLETIONS: dict[str, list[Any]] = {
    **PLAIN,
    "prompt": ["a", ["a", "b"], [5], [[5], [6]]],
    "logprobs": [1],
    "echo": [True],
    "add_special_tokens": [False],
}
MESSAGE: dict[str, list[Any]] = {
    "role": ["user", "assistant", "system", "tool", "developer"],
    "content": ["Hi", None, [{"type": "text", "text": "a"}], [{"type": "image_url"}], ["a"]],
    "tool_calls": [[{"function": {"name": "f", "arguments": "{}"}}], []],
    "tool_call_id": ["c"],
    "name": ["n"],
    "reasoning": ["r"],
}

SCHEMAS: list[Any] = [
    {},
    {"type": "object", "properties": {"a": {"type": "string", "enum": ["x", 5, None]}}},
    {"properties": {"a": True, "b": {"type": ["integer", "null"]}}, "required": ["a", 5]},
    {"properties": 5},
    {"properties": {"a": 5}},
    {"properties": {"a": {"type": 5}}, "required": 5},
    {"required": ["nothing"], "additionalProperties": False},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}},
    {"properties": {"a": {"$ref": "#/nowhere"}, "</parameter>": {}}},
    {"type": "strin"},
]


CONSTRAINTS: list[dict[str, Any]] = [
    *({"json": schema} for schema in SCHEMAS),
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"const": 5}]}}}},
    {
        "json": {
            "$ref": "#/$defs/t",
            "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
        }
    },
    {"json": {"type": "string", "pattern": "^\\\\d+$"}, "disable_any_whitespace": True},
    {"json": {"type": "array", "items": {"type": "number"}, "minItems": 2, "uniqueItems": True}},
    {"json": '{"type": "boolean"}', "whitespace_pattern": "[ ]{0,2}"},
    {"json_object": True},
    *({"regex": regex} for regex in ("[0-9]{2,4}", "(ab|cd)*e", r"\w+\s", "a|", "日本", "[^a]")),
    *({"regex": regex} for regex in ("[", "foo**", "(?=a)b", "^(|.*)$", "(a{1,99}){1,99}")),
    {"choice": ["a", "b", "ab", "日本"]},
    {"choice": ["a"] * 500},
    *({"grammar": text} for text in ('start: "a"+', 'root ::= "a" root | "b"', "root ::= ", "x")),
    {"grammar": 'start: x\nx: "(" x ")" | /[0-9]+/'},
    {"structural_tag": "{}"},
]
"""What ``structured_outputs`` may be; some cannot be kept."""

EMBEDDINGS: dict[str, list[Any]] = {
    "input": ["a", ["a", "b"], [5, 6], [[5], [6, 7]]],
    "model": ["tiny"],
    "encoding_format": ["float", "base64"],
    "dimensions": [8],
    "truncate_prompt_tokens": [4],
    "user": ["u"],
}
TOKENIZE: dict[str, list[Any]] = {
    "prompt": ["a b"],
    "messages": CHAT["messages"],
    "add_special_tokens": [True, False],
    "add_generation_prompt": [True, False],
    "return_token_strs": [True],
    "with_pieces": [True],
    "tools": CHAT["tools"],
    "model": ["tiny"],
}
DETOKENIZE: dict[str, list[Any]] = {"tokens": [[5], [], [5, 6, 7]], "model": ["tiny"]}

ENDPOINTS: dict[str, tuple[dict[str, list[Any]], str, int]] = {
    "/v1/chat/completions": (CHAT, "messages", 35),
    "/v1/completions": (COMPLETIONS, "prompt", 30),
    "/v1/chat/completions/render": (CHAT, "messages", 5),
    "/v1/completions/render": (COMPLETIONS, "prompt", 4),
    "/v1/embeddings": (EMBEDDINGS, "input", 5),
    "/tokenize": (TOKENIZE, "prompt", 6),
    "/v1/detokenize": (DETOKENIZE, "tokens", 5),
}
"""Path → fields, the one that is always there, how often it is asked of 100."""


def valid_body(rng: random.Random, path: str) -> dict[str, Any]:
    """A body of this path that is right, or nearly (fields may exclude each other)."""
    fields, always, _ = ENDPOINTS[path]
    body: dict[str, Any] = {always: rng.choice(fields[always])}
    if always == "messages" and rng.random() < 0.3:
        body[always] = [_message(rng) for _ in range(rng.randint(1, 4))]
    if "max_tokens" in fields and rng.random() < 0.9:
        body["max_tokens"] = rng.randint(1, 3)
    for name in rng.sample(sorted(fields), rng.randint(0, min(5, len(fields)))):
        body.setdefault(name, rng.choice(fields[name]))
    if "structured_outputs" in fields and rng.random() < 0.15:
        body["structured_outputs"] = rng.choice(CONSTRAINTS)
        body["max_tokens"] = rng.randint(1, 20)
    if "response_format" in fields and rng.random() < 0.05:
        schema = rng.choice(SCHEMAS)
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": rng.random() < 0.5},
        }
    return body


def _message(rng: random.Random) -> dict[str, Any]:
    names = {"role", "content", *rng.sample(sorted(MESSAGE), rng.randint(0, 2))}
    return {name: rng.choice(MESSAGE[name]) for name in sorted(names)}
