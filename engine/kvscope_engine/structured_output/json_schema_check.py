"""Finds keywords in a JSON schema that XGrammar (0.2.8) ignores silently.

Schemas with such keywords are refused with the keyword's name, so that an answer always satisfies its whole schema.
Keywords about which XGrammar warns are refused with its own message (`grammar_compiler`);
docs/reference/structured-output.md lists what is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

Schema: TypeAlias = "dict[str, Any] | bool"

NEVER_ENFORCED: Final = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
    }
)
EXCLUSIVE_KEYWORDS: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords in the order in which XGrammar looks for them. It enforces the first one present, and no other
keyword of the same schema.
"""
NUMBER_KEYWORDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
STRING_KEYWORDS: Final = frozenset({"minLength", "maxLength", "pattern", "format"})
ARRAY_KEYWORDS: Final = frozenset({"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"})
OBJECT_KEYWORDS: Final = frozenset(
    {
        *("properties", "required", "additionalProperties", "patternProperties", "unevaluatedProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    }
)
ASSERTIONS: Final = NUMBER_KEYWORDS | STRING_KEYWORDS | ARRAY_KEYWORDS | OBJECT_KEYWORDS
ARRAY_INDICATORS: Final = frozenset({"items", "prefixItems"})
OBJECT_INDICATORS: Final = frozenset({"properties", "additionalProperties", "unevaluatedProperties"})
"""Keywords from which XGrammar infers `"type": "object"` for a schema without `type`. It infers `array` from
`ARRAY_INDICATORS`.
"""
UNKNOWN_FORMATS: Final = frozenset({"regex", "idn-email", "idn-hostname", "iri", "iri-reference"})
"""Values of `format` in the JSON Schema standard that XGrammar does not enforce. Names outside the standard are
mere annotations by the standard itself.
"""
SINGLE_SUBSCHEMA: Final = (
    "additionalProperties",
    "unevaluatedProperties",
    "items",
    "unevaluatedItems",
    "propertyNames",
)
SUBSCHEMA_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SUBSCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
MAX_HOPS: Final = 32
"""Maximum length of a chain of `$ref` references that is followed."""


def unenforced(schema: Schema) -> str:
    """Return a text that names the first part of a schema that would not be enforced, and why; "" if all parts
    are enforced.
    """
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            if found := _unenforced_keyword(part, schema):
                return found
            pending += _subschemas(part)
    return ""


def unenforced_in_tag(tag: Any) -> str:
    """Return a text that names the first part of any schema in the structural tag `tag` (XGrammar's format)
    that would not be enforced; "" if all parts are enforced.
    """
    pending = [tag]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            for name in ("json_schema", "schema"):
                if isinstance(part.get(name), dict) and (found := unenforced(part[name])):
                    return found
            pending += [value for name, value in part.items() if name not in ("json_schema", "schema")]
        elif isinstance(part, list):
            pending += part
    return ""


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    yield from (schema[name] for name in SINGLE_SUBSCHEMA if name in schema)
    for name in SUBSCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            yield from schema[name]
    for name in SUBSCHEMA_MAPS:
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()


def _unenforced_keyword(schema: dict[str, Any], root: Schema) -> str:
    for name in schema:
        if name in NEVER_ENFORCED:
            return f"{name!r} is not enforced"
    if schema.get("uniqueItems") is True:
        return "'uniqueItems' is not enforced"
    whole = next((name for name in EXCLUSIVE_KEYWORDS if name in schema), None)
    return _unenforced_next_to_whole(whole, schema, root) if whole is not None else _unenforced_for_type(schema)


def _unenforced_next_to_whole(whole: str, schema: dict[str, Any], root: Schema) -> str:
    """Return a text that names the first keyword that would not be enforced next to the exclusive keyword
    `whole`; "" if there is none.
    """
    for name in schema:
        if name in ASSERTIONS or (
            name in EXCLUSIVE_KEYWORDS and name != whole and not _is_in_enum(schema, whole, name)
        ):
            return f"{name!r} beside {whole!r} is not enforced"
    if "type" in schema and not (found := _types(schema | {"type": None}, root)) <= _type_names(schema["type"]):
        return f"'type' beside {whole!r} is not enforced, and {whole!r} gives {', '.join(sorted(found))}"
    if whole == "oneOf" and not _are_exclusive(schema["oneOf"], root):
        return "'oneOf' is not enforced if a value can match several of its schemas: use 'anyOf'"
    return ""


def _is_in_enum(schema: dict[str, Any], whole: str, name: str) -> bool:
    return (whole, name) == ("const", "enum") and isinstance(schema[name], list) and schema[whole] in schema[name]


def _unenforced_for_type(schema: dict[str, Any]) -> str:
    names = schema.keys()
    if "type" not in schema:
        return _unenforced_without_type(names)
    if "string" in _type_names(schema["type"]) and schema.get("format") in UNKNOWN_FORMATS:
        return f"'format': {schema['format']!r} is not enforced"
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    if isinstance(required, list) and isinstance(properties, dict):
        unknown = next((name for name in required if isinstance(name, str) and name not in properties), None)
        if unknown is not None:
            return f"{unknown!r:.60} in 'required' is not in 'properties': it is not enforced"
    if "propertyNames" in names and properties:
        return "'propertyNames' beside 'properties' is not enforced"
    return ""


def _unenforced_without_type(names: Any) -> str:
    inferred = (
        OBJECT_KEYWORDS if names & OBJECT_INDICATORS else ARRAY_KEYWORDS if names & ARRAY_INDICATORS else frozenset()
    )
    name = next((name for name in names if name in ASSERTIONS - inferred), None)
    return "" if name is None else f"{name!r} is not enforced without the 'type' that it applies to"


def _type_names(types: object) -> set[str]:
    type_names = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else set()
    return type_names | {"integer"} if "number" in type_names else type_names


def _types(schema: Any, root: Schema, hops: int = MAX_HOPS) -> set[str]:
    """Return the JSON types that a value of the schema may have; "any" if they cannot be determined."""
    if not isinstance(schema, dict) or not hops:
        return {"any"}
    if isinstance(schema.get("$ref"), str):
        return _types(_referenced_schema(schema["$ref"], root), root, hops - 1)
    if "const" in schema:
        return {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return set(map(_type_of, schema["enum"]))
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            return {found for branch in schema[name] for found in _types(branch, root, hops - 1)}
    return _type_names(schema.get("type")) or {"any"}


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _referenced_schema(reference: str, root: Schema) -> Any:
    schema: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema if reference.startswith("#") else None


def _are_exclusive(branches: Any, root: Schema) -> bool:
    """Return whether it is certain that no value satisfies two of the schemas, judging by their types, by the
    values that they list, or by a property that all object schemas require.
    """
    if not isinstance(branches, list):
        return True  # the compiler says what is wrong
    seen: set[str] = set()
    objects: list[Any] = []
    for branch in branches:
        types = _types(branch, root)
        if types == {"object"}:
            objects.append(_resolve_references(branch, root))
            types = set()
        types = types | {"integer"} if "number" in types else types
        if (
            "any" in types
            or "object" in types
            or types & seen - _types_with_exclusive_values(branch, branches, root, types)
        ):
            return False
        seen |= types
    return len(objects) < 2 or any(_distinguishes(name, objects) for name in _required_names(objects[0]))


def _types_with_exclusive_values(branch: Any, branches: list[Any], root: Schema, types: set[str]) -> set[str]:
    """Return `types` if each branch lists its values (by `const` or `enum`) and no value is listed twice;
    otherwise the empty set.
    """
    values_of_branches = [_listed_values(_resolve_references(other, root)) for other in branches]
    if any(values is None for values in values_of_branches):
        return set()
    all_values = [value for values in values_of_branches for value in values or ()]
    return types if len(all_values) == len(set(all_values)) else set()


def _listed_values(schema: Any) -> set[str] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    if isinstance(schema.get("enum"), list):
        return {json.dumps(value, sort_keys=True) for value in schema["enum"]}
    return None


def _required_names(schema: Any) -> list[str]:
    required = schema.get("required") if isinstance(schema, dict) else None
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _distinguishes(name: str, objects: list[Any]) -> bool:
    seen: set[str] = set()
    for schema in objects:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        values = _listed_values(properties.get(name)) if isinstance(properties, dict) else None
        if values is None or name not in _required_names(schema) or values & seen:
            return False
        seen |= values
    return True


def _resolve_references(schema: Any, root: Schema) -> Any:
    for _ in range(MAX_HOPS):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = _referenced_schema(schema["$ref"], root)
    return schema
