"""Reads the constraint on a request's answers, and checks JSON schemas.

A schema that no finite answer matches is refused here. The engine's compiler refuses what it does not implement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from annotated_types import Len
from pydantic import Field, TypeAdapter

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.bodies import (
    FAIL_FAST,
    OBJECT_OR_TEXT,
    Because,
    Body,
    JsonObject,
    NonEmpty,
    Text,
    validate,
)
from mlserver_torch_stream.types import Constraint, ConstraintKind, ModelInfo

_MAX_VISITS = 20_000  # visits of a schema's parts, some 20 ms
_MAX_DEPTH = 150  # nested parts, of which each takes up to three nested Python calls
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def check_finite(field: str, schema: Mapping[str, Any]) -> None:
    """Raises InvalidInput, which names ``field``, if no finite answer matches the schema.

    Only references can make a schema infinite, so it is enough to check the target of each.
    """
    search = _Search(field, schema)
    for reference in dict.fromkeys(_references(schema)):
        if not search.is_finite({"$ref": reference}):
            raise InvalidInput(
                field, f"no finite answer matches {reference}, because each one must contain another one"
            )


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
    """Searches for a finite instance of a schema. A reference from within its own target counts as infinite."""

    def __init__(self, field: str, root: Mapping[str, Any]) -> None:
        self._field = field
        self._root = root
        self._within: list[str] = []
        self._finite: set[str] = set()
        self._visits = self._depth = 0

    def is_finite(self, part: Any) -> bool:
        """Whether the part has a finite instance. Raises InvalidInput if the search takes too many steps."""
        self._visits += 1
        self._depth += 1
        if self._visits > _MAX_VISITS or self._depth > _MAX_DEPTH:
            limits = f"the search takes more than {_MAX_VISITS} steps or {_MAX_DEPTH} levels"
            raise InvalidInput(self._field, f"is too complex to tell whether an answer can end: {limits}")
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
    """Returns the part of the schema that a JSON pointer names; None for any other kind of reference."""
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


JsonGuide = Annotated[JsonObject | NonEmpty, Because(OBJECT_OR_TEXT)]
Choices = Annotated[list[NonEmpty], Len(1, _MAX_CHOICES), FAIL_FAST]


class JsonSchemaFormat(Body):
    """The JSON schema that the answer must match."""

    name: Text | None = None
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's ``response_format``: free text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's constraints on an answer. Other fields of vLLM's class are accepted with their defaults only."""

    json_: JsonGuide | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


GUIDED: Mapping[str, TypeAdapter[Any]] = {
    "json": TypeAdapter(JsonGuide),
    "regex": TypeAdapter(NonEmpty),
    "choice": TypeAdapter(Choices),
    "grammar": TypeAdapter(NonEmpty),
}
_RESPONSE_FORMAT, _STRUCTURED_OUTPUTS = TypeAdapter(ResponseFormat), TypeAdapter(StructuredOutputs)
# The names in Triton's TensorRT-LLM backend.
GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"
_GUIDE_KINDS = {"regex": ConstraintKind.REGEX, "ebnf_grammar": ConstraintKind.GRAMMAR}
guide_type = values.one_of("json", "json_schema", *_GUIDE_KINDS)


def response_format(value: Any, info: ModelInfo) -> Constraint | None:
    """Reads OpenAI's ``response_format``; returns None for free text.

    Raises InvalidInput, or ValueError if the value is not an object.
    """
    field = "response_format"
    said = values.json_object(value, info)
    validate(field, _RESPONSE_FORMAT, said)
    if said["type"] == "text":
        return None
    if said["type"] == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT, "", field)
    if not said.get("json_schema"):
        raise InvalidInput(f"{field}.json_schema", "is needed")
    return _of_schema(said["json_schema"]["schema"], f"{field}.json_schema.schema")


def structured_outputs(value: Any, info: ModelInfo) -> Constraint | None:
    """Reads vLLM's ``structured_outputs``; returns None if it is empty.

    Raises InvalidInput, or ValueError if the value is not an object.
    """
    field = "structured_outputs"
    said = values.json_object(value, info)
    validate(field, _STRUCTURED_OUTPUTS, said)
    kinds = [key for key in ("json", "json_object", "regex", "choice", "grammar") if said.get(key)]
    if "json" in said and said["json"] == {}:  # the schema that everything matches
        kinds.append("json")
    if len(kinds) > 1:
        first = f"{field}.{kinds[0]}"
        raise InvalidInput(f"{field}.{kinds[1]}", f"cannot be combined with {first}: give only one of them")
    return _of_kind(kinds[0], said[kinds[0]], f"{field}.{kinds[0]}") if kinds else None


def guided(kind: str) -> values.Reader:
    """Makes a reader of vLLM's older parameter for a kind of constraint, such as ``guided_json``."""
    field = f"guided_{kind}"

    def read(value: Any, info: ModelInfo) -> Constraint:
        said = values.parse_json(value) if kind == "choice" and isinstance(value, str) else value
        validate(field, GUIDED[kind], said)
        return _of_kind(kind, said, field)

    return read


def text(value: Any, info: ModelInfo) -> str:
    """Reads a string that is not empty."""
    if not values.is_text(value) or not value:
        raise ValueError(f"must be a string that is not empty, got {values.shown(value)}")
    return str(value)


def of_guide(kind: str, guide: str | None) -> Constraint:
    """Makes a constraint from TensorRT-LLM's two parameters, the kind and the guide. Raises InvalidInput."""
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
    """Makes a constraint from a schema, which is an object or JSON text. The schema's properties keep their order."""
    if isinstance(schema, str):
        schema = values.named(field, values.parse_json, schema)
    if not isinstance(schema, Mapping):
        raise InvalidInput(field, f"must be a JSON object, got {values.shown(schema)}")
    if "x-guidance" in schema:
        raise InvalidInput(f"{field}.x-guidance", "cannot be set by a request")
    check_finite(field, schema)
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), field)
