"""Whatever a schema's mask lets through is valid, says an independent validator."""

from __future__ import annotations

import datetime
import json

import jsonschema
import pytest
from structured_output.conftest import Kit, ids_of, text_of
from structured_output.schemas import FIELDS, SCHEMAS

CHECKER = jsonschema.FormatChecker()


@CHECKER.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    """RFC 3339 has a year 0000; Python's calendar begins a year later."""
    if isinstance(value, str):
        datetime.date.fromisoformat(value.replace("0000-", "0004-", 1))
    return True


def test_there_are_enough_schemas() -> None:
    assert len(SCHEMAS) >= 150
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_texts_are_valid(kit: Kit, name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    for seed in range(3):
        text = text_of(kit.walk(kit.grammar(json=schema), seed)).decode()
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", ["form: enum", "form: matrix", "tool: point", "whole: tree"])
def test_valid_documents_are_accepted_in_every_usual_form(kit: Kit, name: str) -> None:
    """Compact, as ``json.dumps`` writes it, and indented."""
    schema = SCHEMAS[name]
    value = json.loads(text_of(kit.walk(kit.grammar(json=schema), seed=5)))
    forms = [json.dumps(value, ensure_ascii=False, indent=indent) for indent in (None, 2, 4)]
    forms.append(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    for text in forms:
        grammar = kit.grammar(json=schema)
        assert grammar.accept_tokens(ids_of(text)), text
        assert grammar.is_terminated()


def test_white_space_is_bounded(kit: Kit) -> None:
    """No answer is filled with it: at most a line break and 32 characters of indentation."""
    grammar = kit.grammar(json=FIELDS["point"])
    assert grammar.accept_tokens(ids_of("{\n" + " " * 32))
    assert not grammar.accept_tokens(ids_of(" "))
    assert not grammar.accept_tokens(ids_of("\n"))
    assert grammar.accept_tokens(ids_of('"x":'))
    assert grammar.accept_tokens(ids_of(" "))
    assert not grammar.accept_tokens(ids_of(" "))


def test_white_space_can_be_chosen(kit: Kit) -> None:
    compact = kit.grammar(json=FIELDS["point"], disable_any_whitespace=True)
    assert compact.accept_tokens(ids_of('{"x":'))
    assert not compact.accept_tokens(ids_of(" "))
    tabs = kit.grammar(json=FIELDS["point"], whitespace_pattern=r"\t?")
    assert tabs.accept_tokens(ids_of('{\t"x":\t'))
    assert not tabs.accept_tokens(ids_of(" "))


@pytest.mark.parametrize("schema", ["true", "{}", '{"type": "object"}'])
def test_a_schema_may_be_a_text(kit: Kit, schema: str) -> None:
    assert kit.grammar(json=schema).accept_tokens(ids_of('{"a": [1, null]}'))


def test_json_object_is_an_object(kit: Kit) -> None:
    for seed in range(5):
        assert isinstance(json.loads(text_of(kit.walk(kit.grammar(json_object=True), seed))), dict)
    assert not kit.grammar(json_object=True).accept_tokens(ids_of("["))
