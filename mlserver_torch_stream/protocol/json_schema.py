"""Checks a value against a JSON schema, and names the place of the first part that does not fit.

Knows only the keywords that this package's tables of parameters use; ``type`` may be a list, and a keyword of one type
says nothing about values of another, as in JSON Schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.values import is_text, printable, shown

Schema = Mapping[str, Any]
STRING: Schema = {"type": "string"}
NULLABLE_STRING: Schema = {"type": ["string", "null"]}

_NAMES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "a JSON object",
    "string": "a string",
}


class ElementBudget:
    """How many elements of lists and objects may be looked at in one value: each takes microseconds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most

    def take(self, place: str, count: int) -> None:
        """Raises InvalidInput."""
        self._left -= count
        if self._left < 0:
            raise InvalidInput(place, f"holds too many elements; at most {self._most} are checked")


def check(place: str, value: Any, schema: Schema, budget: ElementBudget | None = None) -> None:
    """Raises InvalidInput. A list or a text is measured before its elements are looked at. ``budget``: of a value that
    a client has sent, so that none keeps the event loop for seconds. A field of an object that is null counts as
    absent, also an unknown one."""
    _check_type(place, value, schema)
    if "enum" in schema and value not in schema["enum"]:
        why = f"; {schema['description']}" if "description" in schema else ""
        raise InvalidInput(place, f"must be {' or '.join(map(shown, schema['enum']))}, got {shown(value)}{why}")
    if isinstance(value, str):
        _check_size(place, len(value), schema, "Length", "characters")
    elif isinstance(value, list):
        _check_size(place, len(value), schema, "Items", "elements")
        if "items" in schema and not _are_integers(value, schema["items"]):
            _take(budget, place, value)
            for position, element in enumerate(value):
                check(f"{place}[{position}]", element, schema["items"], budget)
    elif isinstance(value, dict):
        _check_object(place, value, schema, budget)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_bounds(place, value, schema)


def nullable(schema: Schema) -> dict[str, Any]:
    """The schema in the words of JSON Schema: known fields may be null. That unknown ones may be too stays unsaid."""
    required, said = schema.get("required", ()), dict(schema)
    if "items" in said:
        said["items"] = nullable(said["items"])
    if "properties" in said:
        properties = said["properties"].items()
        said["properties"] = {
            key: nullable(each) if key in required else with_null(nullable(each)) for key, each in properties
        }
    return said


def with_null(schema: Schema) -> dict[str, Any]:
    said = dict(schema)
    types = [said["type"]] if isinstance(said.get("type"), str) else said.get("type")
    if types is not None and "null" in types:
        return said
    if isinstance(said.get("enum", [None])[0], bool):  # generators of clients know no such ``enum``
        return {"anyOf": [*({"const": each} for each in said["enum"]), {"type": "null"}]}
    if types is not None:
        said["type"] = [*types, "null"]
    if "enum" in said and None not in said["enum"]:
        said["enum"] = [*said["enum"], None]
    return said


def _check_type(place: str, value: Any, schema: Schema) -> None:
    said = schema.get("type", list(_NAMES))
    types = [said] if isinstance(said, str) else said
    if not any(_is(value, kind) for kind in types):
        raise InvalidInput(place, f"must be {' or '.join(_NAMES[kind] for kind in types)}, got {shown(value)}")


def _is(value: Any, kind: str) -> bool:
    if value is None or isinstance(value, bool):
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return kind == "number" or (kind == "integer" and (isinstance(value, int) or value.is_integer()))
    if isinstance(value, str):
        return kind == "string" and is_text(value)
    return kind == ("array" if isinstance(value, list) else "object")


def _check_size(place: str, size: int, schema: Schema, keyword: str, unit: str) -> None:
    if size < schema.get(f"min{keyword}", 0):
        raise InvalidInput(place, "is empty" if size == 0 else f"has only {size} {unit}")
    most = schema.get(f"max{keyword}")
    if most is not None and size > most:
        raise InvalidInput(place, f"must have at most {most} {unit}, got {size}")


def _check_bounds(place: str, value: float, schema: Schema) -> None:
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        raise InvalidInput(place, f"must be above {schema['exclusiveMinimum']}, got {shown(value)}")
    if "minimum" in schema and value < schema["minimum"]:
        raise InvalidInput(place, f"must be at least {schema['minimum']}, got {shown(value)}")
    if "maximum" in schema and value > schema["maximum"]:
        raise InvalidInput(place, f"must be at most {schema['maximum']}, got {shown(value)}")


def _are_integers(value: Sequence[Any], schema: Schema) -> bool:
    """True of plain integers that fit: millions of them, as the ids of a prompt may be, are looked at in 0.1 s."""
    if "integer" not in schema.get("type", ()) or "maximum" in schema or "enum" in schema:
        return False
    return set(map(type, value)) == {int} and min(value) >= schema.get("minimum", min(value))


def _take(budget: ElementBudget | None, place: str, elements: Sized) -> None:
    if budget is not None:
        budget.take(place, len(elements))


def _check_object(place: str, value: Mapping[str, Any], schema: Schema, budget: ElementBudget | None) -> None:
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not isinstance(additional, bool):
        _take(budget, place, value)
    for key, element in value.items():
        if element is None and (key in properties or isinstance(additional, bool)):
            continue
        name = f"{place}.{printable(key)}"
        if key in properties:
            check(name, element, properties[key], budget)
        elif additional is False:
            raise InvalidInput(name, f"unknown key{did_you_mean(printable(key), properties, str)}")
        elif additional is not True:
            check(name, element, additional, budget)
    for key in schema.get("required", ()):
        if value.get(key) is None:
            raise InvalidInput(f"{place}.{key}", "is needed")
