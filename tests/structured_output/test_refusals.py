"""What cannot be kept is refused, with the reason; what would take for ever, at once."""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from structured_output.conftest import Kit, ids_of

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.sampling import StructuredOutputsParams


def refusal(kit: Kit, **params: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        kit.compiler.validate(StructuredOutputsParams(**params))
    assert caught.value.code == "invalid_schema"
    assert caught.value.param == "structured_outputs"
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    # The core says the same, should it ever get there.
    with pytest.raises(InvalidRequestError):
        kit.compiler.compile(StructuredOutputsParams(**params), frozenset()).result()
    # And the next one is served.
    kit.compiler.validate(StructuredOutputsParams(json={"type": "boolean"}))
    return message


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "then"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "string", "format": "haiku"}, "haiku"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
        ({"type": "object", "properties": {"deep": {"items": {"not": {}}}}}, "not"),
    ],
)
def test_keywords_that_cannot_be_kept_are_named(
    make_kit: Callable[..., Kit], caplog: pytest.LogCaptureFixture, schema: Any, word: str
) -> None:
    """Unless the schema is not strict: then they are left out, and the log names them."""
    kit = make_kit()
    assert word in refusal(kit, json=schema)
    with caplog.at_level(logging.WARNING):
        grammar = kit.grammar(json=schema, strict=False)
    assert word in caplog.text
    assert grammar.fill_bitmask()
    kit.compiler.close()


def test_a_schema_cannot_make_itself_lenient(kit: Kit) -> None:
    assert "not" in refusal(kit, json={"not": {}, "x-guidance": {"lenient": True}})


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"type": 5}}, "type"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[1]"}, "list"),
        ({"json": "NaN"}, "NaN"),
        ({"json": "false"}, "allows no value"),
        ({"json": {"minimum": float("nan")}}, "not JSON"),
        ({"json": {"const": object()}}, "not JSON"),
        ({"json": {"$ref": "#/$defs/nobody"}}, "nobody"),
        ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"regex": "["}, "unclosed"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreference"),
        ({"regex": " "}, "blank"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": ()}, "at least one"),
        ({"choice": ("",)}, "not empty"),
        ({"choice": ("a", "b\ud800")}, "surrogate"),
        ({"choice": "abc"}, "list"),
        ({"grammar": "root ::= "}, "empty text"),
        ({"grammar": "start: start"}, "grammar"),
        ({"grammar": "start: nobody"}, "nobody"),
        ({"grammar": "start: <nobody>"}, "nobody"),
        ({"grammar": "%llguidance {]\nstart: A"}, "%llguidance"),
        ({"grammar": ""}, "blank"),
        ({}, "exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"regex": "a", "choice": ("a",)}, "exactly one"),
    ],
)
def test_malformed_constraints(kit: Kit, params: dict[str, Any], words: str) -> None:
    assert words in refusal(kit, **params)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


CYCLE: dict[str, Any] = {}
CYCLE["items"] = CYCLE


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        ({"json": {"enum": ["x" * 1000] * 300}}, "max_schema_bytes"),
        ({"json": json.dumps({"enum": ["x" * 1000] * 300})}, "max_schema_bytes"),
        ({"json": nested(100)}, "max_schema_depth"),
        ({"json": nested(100_000)}, "max_schema_depth"),
        ({"json": CYCLE}, "max_schema_depth"),
        ({"json": "[" * 200_000}, "deeply"),
        ({"json": {"properties": {f"p{i}": {} for i in range(600)}}}, "max_schema_properties"),
        ({"regex": "a" * 9000}, "max_regex_bytes"),
        ({"choice": ("a",) * 2000}, "max_choices"),
        ({"choice": ("\u00e4" * 3000,) * 100}, "max_schema_bytes"),
        ({"grammar": "start: A" + " A" * 40_000}, "max_grammar_bytes"),
        ({"json": {}, "whitespace_pattern": "a" * 9000}, "max_regex_bytes"),
    ],
)
def test_limits_are_named(kit: Kit, params: dict[str, Any], limit: str) -> None:
    assert limit in refusal(kit, **params)


@pytest.mark.parametrize("text", ["x", "%ignore / /", "// nothing", ": a"])
def test_a_grammar_without_rules(kit: Kit, text: str) -> None:
    """Was an error of ours (a status of 500), found by fuzzing."""
    refusal(kit, grammar=text)


def test_a_terminal_that_doubles_two_hundred_times(kit: Kit) -> None:
    """llguidance would never come back."""
    lines = [f"T{i}: T{i + 1} T{i + 1}" for i in range(200)]
    message = refusal(kit, grammar="\n".join(["start: T0", *lines, 'T200: "x"']))
    assert "max_terminal_names" in message
    chain = [f"T{i}: T{i + 1}" for i in range(300)]
    kit.compiler.validate(
        StructuredOutputsParams(grammar="\n".join(["start: T0", *chain, 'T300: "x"']))
    )


HOSTILE: dict[str, dict[str, Any]] = {
    "nested groups": {"regex": "(" * 3000 + "a" + ")" * 3000},
    "nested Lark": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "itself": {"json": {"$ref": "#"}},
    "each other": {
        "json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "all of itself": {
        "json": {
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}},
            "$ref": "#/$defs/a",
        }
    },
    "a large prime": {"json": {"type": "integer", "multipleOf": 999_999_937}},
    "long repeats": {"regex": "((a{0,100}b{0,100}){0,100}c{0,100}){0,100}"},
    "look back far": {"regex": "(.*a){20}.{30}"},
    "plus of plus": {"regex": "(a+)+b"},
    "many ways": {"regex": "|".join("a" * i for i in range(1, 120))},
    "65,535 characters": {"json": {"type": "string", "minLength": 65_535}},
    "empty start": {"grammar": "start: start"},
    "rules that double": {
        "grammar": "\n".join(
            ["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(300)), 'r300: "x"']
        )
    },
    "million": {"grammar": 'start: "a"{1,1000000}'},
    "regex intersections": {
        "json": {"allOf": [{"type": "string", "pattern": f".*{c}.{{20}}x"} for c in "abcdefgh"]}
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused_or_served(kit: Kit, name: str) -> None:
    """Neither hangs, nor takes the process down, nor breaks the one behind it."""
    with contextlib.suppress(InvalidRequestError):
        kit.compiler.validate(StructuredOutputsParams(**HOSTILE[name]))
        grammar = kit.grammar(**HOSTILE[name])
        for _ in range(3):
            grammar.fill_bitmask()
            if not grammar.accept_tokens(ids_of("a")):
                break
    assert kit.grammar(choice=("a",)).accept_tokens(ids_of("a"))


def test_a_mask_beyond_its_limits_is_empty(make_kit: Callable[..., Kit]) -> None:
    """The request that asked for it ends with an error; others with it are none the worse."""
    kit = make_kit(Limits(max_grammar_states=400))
    pattern = "(.*a.{12}b.{12}){3}"
    grammar, other = kit.grammar(regex=pattern), kit.grammar(regex=pattern)
    rng = random.Random(0)
    while any(grammar.fill_bitmask()):
        assert grammar.accept_tokens(ids_of(rng.choice("ab")))
    assert not grammar.is_terminated()
    assert any(other.fill_bitmask())
    assert any(kit.grammar(regex=pattern).fill_bitmask())
    kit.compiler.close()
