"""Builds what OpenAPI documents consist of: objects, references to named schemas, responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import CoreSchema

from mlserver_torch_stream.protocol.spelling import JsonObject

Schema = Mapping[str, Any]
STRING: Schema = {"type": "string"}
NULLABLE_STRING: Schema = {"type": ["string", "null"]}

COUNT: Schema = {"type": "integer", "minimum": 0}
REQUEST_ID: JsonObject = {"description": "The request's own X-Request-Id, or one that is made up.", "schema": STRING}


def object_schema(**properties: Schema) -> JsonObject:
    """All properties are required."""
    return {"type": "object", "required": list(properties), "properties": properties}


def reference(name: str) -> JsonObject:
    """Returns a reference to a schema of the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{name}"}


def response(status: str) -> JsonObject:
    """An error by its status."""
    return {"$ref": f"#/components/responses/{status}"}


def answered(summary: str, content: JsonObject) -> JsonObject:
    """A response of status 200."""
    return {"description": summary, "headers": {"x-request-id": REQUEST_ID}, "content": content}


class _BodySchemas(GenerateJsonSchema):
    """Without what generators of clients would take for a class of its own: titles of fields, and null as a default."""

    def field_title_should_be_set(self, schema: CoreSchema) -> bool:
        return False

    def default_schema(self, schema: CoreSchema) -> JsonObject:
        return self.generate_inner(schema["schema"])


def body_schemas(*bodies: type[BaseModel]) -> JsonObject:
    """The schemas of bodies and of what they consist of, by their names."""
    modes: list[tuple[type[BaseModel], Literal["validation"]]] = [(body, "validation") for body in bodies]
    _, said = models_json_schema(modes, ref_template="#/components/schemas/{model}", schema_generator=_BodySchemas)
    return dict(said["$defs"])
