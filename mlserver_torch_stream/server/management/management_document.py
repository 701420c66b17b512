"""Describes the management API as an OpenAPI document, which ``OPTIONS /`` answers with.

Knows nothing of what answers the paths.
"""

from __future__ import annotations

from typing import Any

from mlserver_torch_stream.version import __version__

# Path, method, name of the operation, parameters of the query, statuses.
_OPERATIONS: tuple[tuple[str, str, str, str, str], ...] = (
    ("/", "options", "apiDescription", "", "200"),
    ("/models", "get", "listModels", "limit next_page_token", "200 400"),
    (
        "/models",
        "post",
        "registerModel",
        "url model_name handler runtime batch_size max_batch_delay response_timeout startup_timeout initial_workers "
        "synchronous",
        "200 202 400 404 409 500",
    ),
    ("/models/{model_name}", "get", "describeModel", "customized", "200 404 503"),
    ("/models/{model_name}", "put", "setAutoScale", "min_worker max_worker synchronous timeout", "200 202 400 404 500"),
    ("/models/{model_name}", "delete", "unregisterModel", "", "200 403 404"),
    ("/models/{model_name}/{model_version}", "get", "version_describeModel", "customized", "200 404 503"),
    (
        "/models/{model_name}/{model_version}",
        "put",
        "version_setAutoScale",
        "min_worker max_worker synchronous timeout",
        "200 202 400 404 500",
    ),
    ("/models/{model_name}/{model_version}", "delete", "version_unregisterModel", "", "200 403 404"),
    ("/models/{model_name}/{model_version}/set-default", "put", "setDefault", "", "200 404"),
    ("/v1/models/{model_name}", "get", "ready", "", "200 404"),
)
_INTEGERS = (
    *("limit", "next_page_token", "min_worker", "max_worker", "timeout", "initial_workers"),
    *("batch_size", "max_batch_delay", "response_timeout", "startup_timeout"),
)
_BOOLEANS = ("synchronous", "customized")


def document() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, method, operation, query, statuses in _OPERATIONS:
        in_path = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        parameters = [_parameter(name, "path") for name in in_path] + [
            _parameter(name, "query") for name in query.split()
        ]
        responses = {status: {"description": _DESCRIPTIONS[status]} for status in statuses.split()}
        described = {"operationId": operation, "parameters": parameters, "responses": responses}
        paths.setdefault(path, {})[method] = described
    return {"openapi": "3.0.1", "info": {"title": "TorchServe APIs", "version": __version__}, "paths": paths}


_DESCRIPTIONS = {
    "200": "OK",
    "202": "Accepted",
    "400": "Bad request, or no valid token",
    "403": "The default version is removed last",
    "404": "Model not found or model version not found",
    "409": "Model already registered",
    "500": "The workers cannot be started",
    "503": "No worker is available",
}


def _parameter(name: str, place: str) -> dict[str, Any]:
    kind = "integer" if name in _INTEGERS else "boolean" if name in _BOOLEANS else "string"
    return {"in": place, "name": name, "required": place == "path" or name == "url", "schema": {"type": kind}}
