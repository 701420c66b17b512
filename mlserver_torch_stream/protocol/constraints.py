"""Reads the constraint of a request's answers, and checks JSON schemas and values against them.

A schema that no finite answer matches is refused here; the engine's compiler finds out later
whether a constraint is implemented.

A part that it cannot read counts as finite.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any
from urllib.parse import unquote

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.values import is_text, printable, shown
from mlserver_torch_stream.types import Constraint, ConstraintKind, ModelInfo

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


_MAX_VISITS = 20_000  # of parts of a schema: some 20 ms
_MAX_DEPTH = 150  # of nested parts; each takes up to three nested Python calls
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def check_finite(field: str, schema: Mapping[str, Any]) -> None:
    """Raises InvalidInput. Only references can make a part infinite, so the targets of all of them are looked at."""
    search = _Search(field, schema)
    for reference in dict.fromkeys(_references(schema)):
        if not search.is_finite({"$ref": reference}):
            raise InvalidInput(field, f"no finite answer matches {reference}: it must hold another of its kind")


def _references(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            left += part.values()
        elif isinstance(part, list):
            left += part


class _Search:
    """Looks for a finite instance of a part. A reference from within its own target counts as infinite."""

    def __init__(self, field: str, root: Mapping[str, Any]) -> None:
        self._field = field
        self._root = root
        self._within: list[str] = []
        self._finite: set[str] = set()
        self._visits = self._depth = 0

    def is_finite(self, part: Any) -> bool:
        self._visits += 1
        self._depth += 1
        if self._visits > _MAX_VISITS or self._depth > _MAX_DEPTH:
            raise InvalidInput(self._field, "refers to itself in too many ways to tell whether an answer can end")
        finite = not isinstance(part, dict) or self._of_object(part)
        self._depth -= 1
        return finite

    def _of_object(self, part: Mapping[str, Any]) -> bool:
        if isinstance(part.get("$ref"), str) and not self._of_reference(part["$ref"]):
            return False
        if not all(self.is_finite(each) for each in _list(part.get("allOf"))):
            return False
        for choices in (part.get("anyOf"), part.get("oneOf")):
            if isinstance(choices, list) and choices and not any(self.is_finite(each) for each in choices):
                return False
        said = part.get("type")
        types = {said} if isinstance(said, str) else {each for each in _list(said) if isinstance(each, str)}
        if not types or types & _SCALARS or "enum" in part or "const" in part:
            return True
        return ("array" in types and self._of_items(part)) or ("object" in types and self._of_properties(part))

    def _of_reference(self, reference: str) -> bool:
        if reference in self._finite:
            return True
        if reference in self._within:
            return False
        self._within.append(reference)
        finite = self.is_finite(_target(self._root, reference))
        self._within.pop()
        if finite:
            self._finite.add(reference)
        return finite

    def _of_items(self, part: Mapping[str, Any]) -> bool:
        least = part.get("minItems", 0)
        if not isinstance(least, (int, float)) or least < 1:
            return True
        prefix = _list(part.get("prefixItems"))
        needed = [*prefix[: int(least)], *([part.get("items")] if least > len(prefix) else [])]
        return all(self.is_finite(each) for each in needed)

    def _of_properties(self, part: Mapping[str, Any]) -> bool:
        said = part.get("properties")
        properties = said if isinstance(said, dict) else {}
        required = _list(part.get("required"))
        additional = part.get("additionalProperties")
        if required:
            return all(self.is_finite(properties.get(str(name), additional)) for name in required)
        least = part.get("minProperties", 0)
        if not isinstance(least, (int, float)) or least < 1 or "patternProperties" in part:
            return True
        return any(self.is_finite(each) for each in (*properties.values(), additional))


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _target(root: Any, reference: str) -> Any:
    """The part that a JSON pointer within the schema names; None for other references."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    part = root
    for step in reference[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


_MAX_CHOICES = 4096
_OPTIONAL_STRING: Schema = {"type": ["string", "null"], "minLength": 1}
RESPONSE_FORMAT: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "json_schema": {
            "type": ["object", "null"],
            "required": ["schema"],
            "properties": {
                "name": {"type": "string"},
                "description": {"type": ["string", "null"]},
                "schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
STRUCTURED_OUTPUTS: Schema = {
    "type": "object",
    "properties": {
        "json": {"type": ["object", "string", "null"], "minLength": 1},
        "json_object": {"type": ["boolean", "null"]},
        "regex": _OPTIONAL_STRING,
        "choice": {
            "type": ["array", "null"],
            "minItems": 1,
            "maxItems": _MAX_CHOICES,
            "items": {"type": "string", "minLength": 1},
        },
        "grammar": _OPTIONAL_STRING,
        # Further fields of vLLM's own class, with the values that ask for nothing.
        "disable_any_whitespace": {"type": "boolean"},
        "disable_additional_properties": {"type": "boolean", "enum": [False]},
        "disable_fallback": {"type": "boolean"},
        "whitespace_pattern": {"type": "null"},
        "structural_tag": {"type": "null"},
    },
    "additionalProperties": False,
}
# As TensorRT-LLM's backend of Triton names them.
GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"
_GUIDE_KINDS = {"regex": ConstraintKind.REGEX, "ebnf_grammar": ConstraintKind.GRAMMAR}
guide_type = values.one_of("json", "json_schema", *_GUIDE_KINDS)


def response_format(value: Any, info: ModelInfo) -> Constraint | None:
    """Reads OpenAI's ``response_format``; None for free text. Raises InvalidInput, or ValueError if the value is no
    object."""
    field = "response_format"
    said = values.json_object(value, info)
    check(field, said, RESPONSE_FORMAT)
    if said["type"] == "text":
        return None
    if said["type"] == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT, "", field)
    if not said.get("json_schema"):
        raise InvalidInput(f"{field}.json_schema", "is needed")
    return _of_schema(said["json_schema"]["schema"], f"{field}.json_schema.schema")


def structured_outputs(value: Any, info: ModelInfo) -> Constraint | None:
    """Reads vLLM's ``structured_outputs``; None if it is empty. Raises InvalidInput, or ValueError if the value is no
    object."""
    field = "structured_outputs"
    said = values.json_object(value, info)
    check(field, said, STRUCTURED_OUTPUTS, ElementBudget(_MAX_CHOICES))
    kinds = [key for key in ("json", "json_object", "regex", "choice", "grammar") if said.get(key)]
    if "json" in said and said["json"] == {}:  # a schema of anything
        kinds.append("json")
    if len(kinds) > 1:
        raise InvalidInput(f"{field}.{kinds[1]}", f"contradicts {field}.{kinds[0]}")
    return _of_kind(kinds[0], said[kinds[0]], f"{field}.{kinds[0]}") if kinds else None


def text(value: Any, info: ModelInfo) -> str:
    if not values.is_text(value) or not value:
        raise ValueError(f"must be a string that is not empty, got {values.shown(value)}")
    return str(value)


def of_guide(kind: str, guide: str | None) -> Constraint:
    """Reads TensorRT-LLM's guide of the kind that ``guide_type`` has read. Raises InvalidInput."""
    if kind == "json":
        return Constraint(ConstraintKind.JSON_OBJECT, "", GUIDE_TYPE)
    if guide is None:
        raise InvalidInput(GUIDE, f"is needed for {GUIDE_TYPE} {values.shown(kind)}")
    if kind == "json_schema":
        return _of_schema(guide, GUIDE)
    return Constraint(_GUIDE_KINDS[kind], guide, GUIDE)


def _of_kind(kind: str, value: Any, field: str) -> Constraint:
    if kind == "json":
        return _of_schema(value, field)
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT, "", field)
    source = json.dumps(value, ensure_ascii=False) if kind == "choice" else value
    return Constraint(ConstraintKind(kind), source, field)


def _of_schema(schema: Any, field: str) -> Constraint:
    """``schema``: as an object, or written as JSON. The order of its properties stays."""
    if isinstance(schema, str):
        schema = values.named(field, values.parse_json, schema)
    if not isinstance(schema, Mapping):
        raise InvalidInput(field, f"must be a JSON object, got {values.shown(schema)}")
    if "x-guidance" in schema:
        raise InvalidInput(f"{field}.x-guidance", "is not taken from requests")
    check_finite(field, schema)
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), field)
