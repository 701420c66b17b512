"""Builds the parts of OpenAPI documents: object schemas, references to named schemas, responses."""

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
REQUEST_ID: JsonObject = {"description": "The request's X-Request-Id, or one that the server made.", "schema": STRING}


def object_schema(**properties: Schema) -> JsonObject:
    """Returns the schema of an object with these properties, all of which are required."""
    return {"type": "object", "required": list(properties), "properties": properties}


def reference(name: str) -> JsonObject:
    """Returns a reference to a schema of the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{name}"}


def response(status: str) -> JsonObject:
    """Returns the response for an error of this status."""
    return {"$ref": f"#/components/responses/{status}"}


def answered(summary: str, content: JsonObject) -> JsonObject:
    """Returns a response of status 200."""
    return {"description": summary, "headers": {"x-request-id": REQUEST_ID}, "content": content}


class _BodySchemas(GenerateJsonSchema):
    """Omits the titles of fields and null defaults, because client generators would write a separate class for each."""

    def field_title_should_be_set(self, schema: CoreSchema) -> bool:
        return False

    def default_schema(self, schema: CoreSchema) -> JsonObject:
        return self.generate_inner(schema["schema"])


def body_schemas(*bodies: type[BaseModel]) -> JsonObject:
    """Returns the schemas of these bodies and of their parts, by name."""
    modes: list[tuple[type[BaseModel], Literal["validation"]]] = [(body, "validation") for body in bodies]
    _, said = models_json_schema(modes, ref_template="#/components/schemas/{model}", schema_generator=_BodySchemas)
    return dict(said["$defs"])
