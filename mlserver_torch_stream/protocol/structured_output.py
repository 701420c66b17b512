"""Reads the constraint of a request's answers: a schema, an expression, a list of choices, or a grammar.

Knows nothing of tokens. A schema that no finite answer matches is refused here; the engine's compiler finds out later
whether a constraint is implemented.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.finite_schema import check_finite
from mlserver_torch_stream.protocol.json_schema import ElementBudget, Schema, check
from mlserver_torch_stream.types import Constraint, ConstraintKind, ModelInfo

_MOST_CHOICES = 4096
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
            "maxItems": _MOST_CHOICES,
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
    check(field, said, STRUCTURED_OUTPUTS, ElementBudget(_MOST_CHOICES))
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
