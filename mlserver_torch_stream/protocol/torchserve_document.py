"""Builds the OpenAPI documents of TorchServe's paths: one for the server, and one for each model.

Operations have TorchServe's names and summaries, so that generated clients keep working.
"""

from __future__ import annotations

from mlserver_torch_stream.protocol.openapi_parts import STRING, Schema, object_schema
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.version import __version__

_ANYTHING: JsonObject = {"*/*": {"schema": {"type": "string", "format": "binary"}}}
_ERRORS = {
    "404": "Model not found or Model Version not found",
    "500": "Internal Server Error",
    "503": "No worker is available to serve request",
}
_PREDICT = "Predictions entry point to get inference using {} model version."


def server_document() -> JsonObject:
    """Returns the OpenAPI document, version 3.0.1, of the server's paths."""
    by_name = _predicting("predictions", _PREDICT.format("default"), "model_name")
    version = _predicting("version_predictions", _PREDICT.format("specific"), "model_name", "model_version")
    description = "The paths of TorchServe's inference API that this server has"
    return _document(
        {"title": "TorchServe APIs", "description": description, "version": __version__},
        {
            "/": {"options": _describing("apiDescription")},
            "/ping": {"get": _reading("ping", "Get TorchServe status.", object_schema(status=STRING))},
            "/v1/models/{model_name}:predict": _predicting("v1_predictions", _PREDICT.format("default"), "model_name"),
            "/v2/models/{model_name}/infer": _predicting("v2_infer", _PREDICT.format("default"), "model_name"),
            "/predictions/{model_name}": by_name,
            "/predictions/{model_name}/{model_version}": version,
            "/api-description": {"get": {**_describing("api-description"), "deprecated": True}},
            "/metrics": {"get": _metrics()},
        },
    )


def model_document(name: str, paths: tuple[str, ...]) -> JsonObject:
    """Returns the OpenAPI document, version 3.0.1, of one model's paths, all for POST."""
    described = {path: _predicting(f"{name}{path}", f"A predict entry point for model: {name}.") for path in paths}
    return _document({"title": f"RESTful API for: {name}", "version": "1.0.0"}, described)


def _document(info: JsonObject, paths: JsonObject) -> JsonObject:
    return {"openapi": "3.0.1", "info": info, "paths": paths}


def _predicting(operation: str, summary: str, *parameters: str) -> JsonObject:
    post = {
        "description": summary,
        "operationId": operation,
        "parameters": [{"in": "path", "name": name, "required": True, "schema": STRING} for name in parameters],
        "requestBody": {
            "description": "Input data format is defined by each model.",
            "content": _ANYTHING,
            "required": True,
        },
        "responses": {
            "200": {"description": "Output data format is defined by each model.", "content": _ANYTHING},
            **{status: _error(summary) for status, summary in _ERRORS.items()},
        },
    }
    return {"post": post}


def _describing(operation: str) -> JsonObject:
    schema = object_schema(openapi=STRING, info={"type": "object"}, paths={"type": "object"})
    return _reading(operation, "Get openapi description.", schema)


def _reading(operation: str, summary: str, schema: Schema) -> JsonObject:
    answered = {"description": summary, "content": {"application/json": {"schema": schema}}}
    return {"description": summary, "operationId": operation, "responses": {"200": answered}}


def _metrics() -> JsonObject:
    summary = "Get TorchServe application metrics in prometheus format."
    answered = {"description": summary, "content": {"text/plain": {"schema": STRING}}}
    return {"description": summary, "operationId": "metrics", "responses": {"200": answered}}


def _error(summary: str) -> JsonObject:
    schema = object_schema(code={"type": "integer"}, type=STRING, message=STRING)
    return {"description": summary, "content": {"application/json": {"schema": schema}}}
