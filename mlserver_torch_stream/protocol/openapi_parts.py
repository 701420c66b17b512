"""Builds what OpenAPI documents consist of: objects, references to named schemas, responses."""

from __future__ import annotations

from mlserver_torch_stream.protocol.constraints import STRING, Schema
from mlserver_torch_stream.protocol.spelling import JsonObject

COUNT: Schema = {"type": "integer", "minimum": 0}
REQUEST_ID: JsonObject = {"description": "The request's own X-Request-Id, or one that is made up.", "schema": STRING}


def object_schema(**properties: Schema) -> JsonObject:
    """All properties are required."""
    return {"type": "object", "required": list(properties), "properties": properties}


def reference(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}


def response(status: str) -> JsonObject:
    """An error by its status."""
    return {"$ref": f"#/components/responses/{status}"}


def answered(summary: str, content: JsonObject) -> JsonObject:
    """A response of status 200."""
    return {"description": summary, "headers": {"x-request-id": REQUEST_ID}, "content": content}
