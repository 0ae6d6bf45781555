"""What XGrammar would ignore is refused by name; what it enforces is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope_engine.structured_output.json_schema_check import unenforced, unenforced_in_tag

INTEGER = {"type": "integer"}
CAT, DOG = (
    {"type": "object", "properties": {"kind": {"const": kind, "type": "string"}}, "required": ["kind"]}
    for kind in ("cat", "dog")
)

REFUSED: dict[str, Any] = {
    "'not'": {"not": {}},
    "'if'": {"if": {"const": 1}, "then": {"const": 2}},
    "'$dynamicRef'": {"$dynamicRef": "#x"},
    "'dependentRequired'": {"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}},
    "'contains'": {"type": "array", "items": INTEGER, "contains": {"const": 5}},
    "'uniqueItems'": {"type": "array", "items": INTEGER, "uniqueItems": True},
    "'minimum' beside 'enum'": {"enum": [1, 2], "minimum": 2},
    "'minimum' beside '$ref'": {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": INTEGER}},
    "'required' beside 'anyOf'": {"type": "object", "anyOf": [CAT], "required": ["kind"]},
    "'type' beside 'anyOf'": {"type": "string", "anyOf": [INTEGER]},
    "'type' beside 'enum'": {"type": "string", "enum": ["a", 1]},
    "'minimum' is not enforced without the 'type'": {"minimum": 5},
    "'z' in 'required'": {"type": "object", "properties": {"a": {}}, "required": ["z"]},
    "'propertyNames' beside": {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^x"}},
    "'format': 'iri'": {"type": "string", "format": "iri"},
    "'oneOf' is not enforced if a value can match several": {"oneOf": [INTEGER, {"type": "number"}]},
}
PLACES = {
    "in a property": lambda schema: {"type": "object", "properties": {"deep": schema}},
    "in items": lambda schema: {"type": "array", "items": schema},
    "in a definition": lambda schema: {"$ref": "#/$defs/one", "$defs": {"one": schema}},
    "in a branch": lambda schema: {"anyOf": [{"type": "null"}, schema]},
}


@pytest.mark.parametrize("named", REFUSED)
def test_unenforced_keyword_is_named(named: str) -> None:
    assert named in unenforced(REFUSED[named])


@pytest.mark.parametrize("place", PLACES)
def test_unenforced_keyword_is_found_in_every_position(place: str) -> None:
    assert unenforced(PLACES[place]({"type": "array", "items": {}, "uniqueItems": True}))
    assert unenforced_in_tag({"format": {"type": "json_schema", "json_schema": PLACES[place]({"not": {}})}})


ACCEPTED: dict[str, Any] = {
    "anything": True,
    "an empty one": {},
    "notes": {"type": "integer", "title": "t", "description": "d", "default": 1, "examples": [1], "x-mine": {"not": 1}},
    "names like keywords": {"type": "object", "properties": {"not": INTEGER, "if": INTEGER}, "required": ["not"]},
    "values like schemas": {"enum": [{"not": 1}, {"uniqueItems": True}]},
    "a type and its values": {"type": "string", "enum": ["a", "b"]},
    "numbers": {"type": "number", "enum": [1, 2.5]},
    "a value among some": {"const": "a", "enum": ["a", "b"], "type": "string"},
    "optional, as pydantic writes it": {
        "anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}],
        "default": None,
    },
    "one of two kinds, as pydantic writes it": {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {"Cat": CAT, "Dog": DOG},
    },
    "one of some values": {"oneOf": [{"const": "a"}, {"const": "b"}]},
    "one of two types": {"oneOf": [{"type": "string"}, {"type": "null"}]},
    "an object of its branches": {"type": "object", "anyOf": [CAT, DOG]},
    "a list that may repeat": {"type": "array", "items": INTEGER, "minItems": 1, "uniqueItems": False},
    "a format of numbers": {"type": "integer", "format": "int32"},
    "properties without a type": {"properties": {"a": INTEGER}, "required": ["a"]},
    "a loop": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_enforced_schema_is_accepted(name: str) -> None:
    assert unenforced(ACCEPTED[name]) == ""
