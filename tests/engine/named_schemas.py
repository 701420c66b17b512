"""Twenty JSON schemas, each named for what it requires of an answer. Does not use the engine."""

from __future__ import annotations

from typing import Any

_STRING = {"type": "string", "maxLength": 12}


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
        **more,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": _object({"name": _STRING, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    "nested": _object({"a": _object({"b": _object({"c": _object({"d": {"type": "boolean"}})})})}),
    "optional": _object({"a": _STRING, "b": {"type": "null"}, "c": {"type": "boolean"}}, "b"),
    "reference": _object(
        {"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}},
        **{"$defs": {"place": _object({"x": {"type": "integer", "minimum": -9, "maximum": 9}})}},
    ),
    "any of": {"anyOf": [_object({"kind": {"const": "a"}, "n": {"enum": [1, 2]}}), _object({"kind": {"const": "b"}})]},
    "all of": {"allOf": [_object({"a": _STRING}, additionalProperties=True), {"maxProperties": 1}]},
    "nullable": _object({"a": {"anyOf": [_STRING, {"type": "null"}]}, "b": {"type": ["integer", "null"], "maximum": 5,
                                                                             "minimum": 0}}),
    "enum": _object({"a": {"enum": ["red", "grün", 'quo"te', "back\\slash", 3, 1.5, None, True, [], {"x": 1}]}}),
    "pattern": _object({"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}}),
    "string bounds": _object({"a": {"type": "string", "minLength": 3, "maxLength": 5}}),
    "array bounds": _object({"a": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4}}),
    "tuple": {
        "type": "array",
        "prefixItems": [{"enum": ["x"]}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "tree": {"type": "array", "items": {"anyOf": [{"enum": ["a", "b"]}, {"$ref": "#"}]}, "maxItems": 2},
    "list": {
        "type": "array",
        "prefixItems": [{"enum": [1, 2, 3]}],
        "items": {"$ref": "#"},
        "minItems": 1,
        "maxItems": 2,
    },
    "formats": _object({key: {"type": "string", "format": key} for key in ("date", "uuid", "ipv4")}),
    "number bounds": _object(
        {
            "a": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
            "b": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
        }
    ),
    "unicode": _object({"größe": {"enum": ["日本", "🙂", "a\u0301"]}, "Straße": {"const": "Köln"}}),
    "empty objects": _object({"a": {"type": "object", "additionalProperties": False}, "b": {"const": {}}}),
    "a map": {
        "type": "object",
        "patternProperties": {"^[a-c]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "other properties": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["id", "extra"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
}  # fmt: skip
