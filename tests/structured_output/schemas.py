"""More than 150 JSON schemas of the kinds that people send: forms, records, tools, unions, trees.

A schema is a sum of a shape and of what its fields hold, so the set covers pairs of features.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "maxLength": 8}

FIELDS: dict[str, Schema] = {
    "short text": STRING,
    "bounded text": {"type": "string", "minLength": 2, "maxLength": 5},
    "digits": {"type": "string", "pattern": "^[0-9]{2,4}$"},
    "word": {"type": "string", "pattern": "^\\w{2,4}$"},
    "escaped": {"type": "string", "pattern": "^hello there indeed\\!$"},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}(-[a-z]+)?$", "maxLength": 14},
    "integer": {"type": "integer", "minimum": -20, "maximum": 130},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "price": {"type": "number", "minimum": 0.5, "maximum": 99.5},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum": {"enum": ["red", "green", 'quoted "blue"', "gr\u00fcn", "a/b"]},
    "enum of kinds": {"enum": [1, 2.5, None, True, "x", ["y"], {"z": 1}]},
    "const": {"const": "v1"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "nullable": {"type": ["string", "null"], "maxLength": 5},
    "optional number": {"anyOf": [{"type": "integer", "maximum": 99}, {"type": "null"}]},
    "union": {"anyOf": [STRING, {"type": "integer", "maximum": 99}, {"type": "boolean"}]},
    "either": {"oneOf": [{"const": "a"}, {"const": 1}, {"type": "null"}]},
    "both": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "list": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3},
    "full list": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3},
    "matrix": {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    },
    "pair": {
        "type": "array",
        "prefixItems": [{"type": "integer", "maximum": 9}, {"const": "m"}],
        "items": False,
        "minItems": 2,
    },
    "point": {
        "type": "object",
        "properties": {
            "x": {"type": "number", "minimum": -1, "maximum": 1},
            "y": {"type": "integer", "maximum": 9},
        },
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "maximum": 9},
        "maxProperties": 2,
    },
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "annotated": {
        "type": "string",
        "maxLength": 6,
        "title": "A",
        "description": "b",
        "default": "c",
        "examples": ["d"],
    },
}


def form(field: Schema) -> Schema:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 999}, "value": field},
        "required": ["id", "value"],
        "additionalProperties": False,
    }


def optional(field: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "value": field, "c": {"type": "null"}},
        "required": ["c"],
        "additionalProperties": False,
    }


def list_of(field: Schema) -> Schema:
    return {"type": "array", "items": field, "minItems": 1, "maxItems": 2}


def referenced(field: Schema) -> Schema:
    return {
        "$ref": "#/$defs/Outer",
        "$defs": {
            "Outer": {
                "type": "object",
                "properties": {"inner": {"$ref": "#/$defs/Inner"}},
                "required": ["inner"],
                "additionalProperties": False,
            },
            "Inner": field,
        },
    }


def tool(field: Schema) -> Schema:
    call = {
        "type": "object",
        "properties": {
            "name": {"const": "lookup"},
            "arguments": {
                "type": "object",
                "properties": {"value": field},
                "required": ["value"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return {"anyOf": [call, {"const": "none"}]}


SHAPES = {
    "form": form,
    "optional": optional,
    "list": list_of,
    "referenced": referenced,
    "tool": tool,
}

WHOLE: dict[str, Schema] = {
    "anything": {},
    "tree": {
        "$ref": "#/$defs/Node",
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "maximum": 9},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 2},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
    "definitions behind use": {
        "$ref": "#/$defs/A",
        "$defs": {
            "A": {
                "type": "object",
                "properties": {"c": {"$ref": "#/$defs/E"}},
                "required": ["c"],
                "additionalProperties": False,
            },
            "E": {"enum": ["red", "blue"]},
        },
    },
    "old definitions": {
        "$ref": "#/definitions/A",
        "definitions": {"A": {"type": "string", "enum": ["x", "y"]}},
    },
    "open object": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9}},
        "required": ["a"],
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": {"type": "integer", "maximum": 9}},
        "additionalProperties": False,
    },
    "tagged union": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "v": field},
                "required": ["kind", "v"],
                "additionalProperties": False,
            }
            for kind, field in [("text", STRING), ("flag", {"type": "boolean"})]
        ]
    },
    "merged": {
        "allOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
            },
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
    },
}

SCHEMAS: dict[str, Schema] = {
    **{f"field: {name}": schema for name, schema in FIELDS.items()},
    **{
        f"{shape}: {name}": build(schema)
        for shape, build in SHAPES.items()
        for name, schema in FIELDS.items()
    },
    **{f"whole: {name}": schema for name, schema in WHOLE.items()},
}
