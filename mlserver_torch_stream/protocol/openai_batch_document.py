"""The part of the OpenAPI document that describes files and batches."""

from __future__ import annotations

from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.openapi_parts import (
    COUNT,
    NULLABLE_STRING,
    STRING,
    Schema,
    answered,
    object_schema,
    reference,
    response,
)
from mlserver_torch_stream.protocol.spelling import JsonObject

_FILE_ID: Schema = {"type": "string", "pattern": "^file-[0-9a-f]{32}$"}
_BATCH_ID: Schema = {"type": "string", "pattern": "^batch_[0-9a-f]{32}$"}
_BYTES: JsonObject = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_BATCH_REQUEST: JsonObject = {"application/json": {"schema": reference("BatchRequest")}}
_FORM: JsonObject = {
    "multipart/form-data": {
        "schema": {
            **object_schema(purpose={"enum": ["batch"]}, file={"type": "string", "format": "binary", "minLength": 1}),
            "additionalProperties": False,
        }
    }
}
_NULLABLE_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_STATUSES = ["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
_METADATA: Schema = {
    "type": ["object", "null"],
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}
_FAILURES = ("404", "503")  # of every path: the server keeps no files, or its store does not answer


def batch_paths() -> JsonObject:
    return {
        "/v1/files": {
            **_create("createFile", "Keeps a file of rows.", "File", _FORM),
            **_list("listFiles", "The files.", "File", _FILE_ID, 10_000, _query("purpose", STRING), _order()),
        },
        "/v1/files/{file_id}": {
            "parameters": [_id("file_id")],
            **_one("get", "retrieveFile", "One file.", "File"),
            **_one("delete", "deleteFile", "Deletes a file that no unfinished batch reads.", "DeletedFile", "400"),
        },
        "/v1/files/{file_id}/content": {
            "parameters": [_id("file_id")],
            "get": _operation("downloadFile", "The content of a file.", _BYTES),
        },
        "/v1/batches": {
            **_create("createBatch", "Answers the rows of a file.", "Batch", _BATCH_REQUEST),
            **_list("listBatches", "The batches, the newest first.", "Batch", _BATCH_ID, 100),
        },
        "/v1/batches/{batch_id}": {
            "parameters": [_id("batch_id")],
            **_one("get", "retrieveBatch", "One batch.", "Batch"),
        },
        "/v1/batches/{batch_id}/cancel": {
            "parameters": [_id("batch_id")],
            **_one("post", "cancelBatch", "Stops a batch; what was answered is kept.", "Batch", "400"),
        },
    }


def batch_schemas() -> JsonObject:
    times = {f"{status}_at": _NULLABLE_COUNT for status in _STATUSES[1:]}
    return {
        "BatchRequest": {
            "type": "object",
            "required": ["input_file_id", "endpoint", "completion_window"],
            "properties": {
                "input_file_id": _FILE_ID,
                "endpoint": {"enum": list(OPENAI_SPELLINGS)},
                "completion_window": {"enum": ["24h"]},
                "metadata": _METADATA,
                "output_expires_after": {"type": "null", "description": "Not implemented."},
            },
            "additionalProperties": False,
        },
        "Batch": object_schema(
            id=_BATCH_ID,
            object={"enum": ["batch"]},
            endpoint=STRING,
            errors={"type": ["object", "null"]},
            input_file_id=_FILE_ID,
            completion_window=STRING,
            status={"enum": _STATUSES},
            output_file_id=NULLABLE_STRING,
            error_file_id=NULLABLE_STRING,
            created_at=COUNT,
            expires_at=COUNT,
            **times,
            request_counts=object_schema(total=COUNT, completed=COUNT, failed=COUNT),
            metadata={"type": ["object", "null"]},
        ),
        "BatchList": _page("Batch"),
        "File": object_schema(
            id=_FILE_ID,
            object={"enum": ["file"]},
            bytes=COUNT,
            created_at=COUNT,
            filename=STRING,
            purpose={"enum": ["batch", "batch_output"]},
            status={"enum": ["processed"]},
            expires_at={"type": "null"},
        ),
        "FileList": _page("File"),
        "DeletedFile": object_schema(id=_FILE_ID, object={"enum": ["file"]}, deleted={"type": "boolean"}),
    }


def _operation(operation: str, summary: str, content: JsonObject, *errors: str) -> JsonObject:
    responses = {"200": answered(summary, content), **{status: response(status) for status in (*errors, *_FAILURES)}}
    return {"operationId": operation, "summary": summary, "responses": responses}


def _one(method: str, operation: str, summary: str, name: str, *errors: str) -> JsonObject:
    return {method: _operation(operation, summary, {"application/json": {"schema": reference(name)}}, *errors)}


def _create(operation: str, summary: str, name: str, content: JsonObject) -> JsonObject:
    (created,) = _one("post", operation, summary, name, "400", "413", "415", "429", "507").values()
    return {"post": {**created, "requestBody": {"required": True, "content": content}}}


def _list(operation: str, summary: str, name: str, after: Schema, most: int, *more: JsonObject) -> JsonObject:
    (listed,) = _one("get", operation, summary, f"{name}List", "400").values()
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    return {"get": {**listed, "parameters": [_query("limit", limit), _query("after", after), *more]}}


def _page(name: str) -> JsonObject:
    return object_schema(
        object={"enum": ["list"]},
        data={"type": "array", "items": reference(name)},
        first_id=NULLABLE_STRING,
        last_id=NULLABLE_STRING,
        has_more={"type": "boolean"},
    )


def _order() -> JsonObject:
    return _query("order", {"enum": ["asc", "desc"], "description": "By age; desc: the newest first, as without it."})


def _query(name: str, schema: Schema) -> JsonObject:
    return {"name": name, "in": "query", "schema": schema}


def _id(name: str) -> JsonObject:
    return {"name": name, "in": "path", "required": True, "schema": STRING}
