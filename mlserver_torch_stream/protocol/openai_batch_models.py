"""Declares the ids, bodies and queries of OpenAI's files and batches, and their part of the OpenAPI document.

``openai_batch`` reads and writes the lines of the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Le, MaxLen
from pydantic import Field

from mlserver_torch_stream.protocol.bodies import Because, Body, Refused, Text
from mlserver_torch_stream.protocol.openapi_parts import (
    COUNT,
    NULLABLE_STRING,
    STRING,
    Schema,
    answered,
    body_schemas,
    object_schema,
    reference,
    response,
)
from mlserver_torch_stream.protocol.spelling import JsonObject

FILE, BATCH = (
    "file-",
    "batch_",
)  # an id is one of these prefixes and hexadecimal digits, so it is safe in keys and paths
ID_DIGITS = 32
_ID = re.compile(rf"(?:{FILE}|{BATCH})[0-9a-f]{{{ID_DIGITS}}}")
PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
WINDOW = "24h"
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
STATUSES: tuple[Status, ...] = get_args(Status)

_FileId = Annotated[str, Field(pattern=f"^{FILE}[0-9a-f]{{{ID_DIGITS}}}$"), Because("must be the id of a file")]
_BatchId = Annotated[str, Field(pattern=f"^{BATCH}[0-9a-f]{{{ID_DIGITS}}}$"), Because("must be the id of a batch")]
_Metadata = Annotated[
    dict[Annotated[str, MaxLen(64)], Annotated[str, MaxLen(512)]],
    MaxLen(16),
    Because("must be an object with at most 16 keys of up to 64 characters and strings of up to 512 characters"),
]


def is_id(prefix: str, text: object) -> bool:
    """Whether a text is an id that the server made, with this prefix."""
    return isinstance(text, str) and text.startswith(prefix) and _ID.fullmatch(text) is not None


class BatchRequest(Body):
    """The body of ``POST /v1/batches``."""

    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    input_file_id: _FileId
    metadata: _Metadata | None = None
    output_expires_after: Annotated[Any, Refused()] = None


class BatchQuery(Body, strict=False):
    """The query parameters for listing batches. The page begins after the object with the id ``after``."""

    limit: Annotated[int, Ge(1), Le(100)] = 20
    after: _BatchId | None = None


class FileQuery(Body, strict=False):
    """The query parameters for listing files. ``order`` sorts by age."""

    limit: Annotated[int, Ge(1), Le(10_000)] = 10_000
    after: _FileId | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: Text | None = None


_LINES: JsonObject = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_FORM = object_schema(purpose={"enum": [PURPOSE]}, file={"type": "string", "format": "binary", "minLength": 1})
_BODIES: Mapping[str, JsonObject] = {
    "createFile": {"multipart/form-data": {"schema": {**_FORM, "additionalProperties": False}}},
    "createBatch": {"application/json": {"schema": reference("BatchRequest")}},
}
_QUERIES: Mapping[str, type[Body]] = {"listFiles": FileQuery, "listBatches": BatchQuery}
_CREATES = ("400", "413", "415", "429", "507")
_FAILURES = ("404", "503")  # possible on every path: the server keeps no files, or its store does not answer
# (path, method, operation, summary, schema of the answer, errors)
_OPERATIONS: tuple[tuple[str, str, str, str, str, tuple[str, ...]], ...] = (
    ("/v1/files", "post", "createFile", "Stores a file of rows.", "File", _CREATES),
    ("/v1/files", "get", "listFiles", "The files.", "FileList", ("400",)),
    ("/v1/files/{file_id}", "get", "retrieveFile", "One file.", "File", ()),
    ("/v1/files/{file_id}", "delete", "deleteFile", "Deletes a file that no batch reads.", "DeletedFile", ("400",)),
    ("/v1/files/{file_id}/content", "get", "downloadFile", "The content of a file.", "", ()),
    ("/v1/batches", "post", "createBatch", "Answers the rows of a file.", "Batch", _CREATES),
    ("/v1/batches", "get", "listBatches", "The batches, the newest first.", "BatchList", ("400",)),
    ("/v1/batches/{batch_id}", "get", "retrieveBatch", "One batch.", "Batch", ()),
    ("/v1/batches/{batch_id}/cancel", "post", "cancelBatch", "Stops a batch; answers are kept.", "Batch", ("400",)),
)


def batch_paths() -> JsonObject:
    """Returns the OpenAPI paths of files and batches."""
    paths: dict[str, dict[str, Any]] = {}
    for path, method, operation, summary, schema, errors in _OPERATIONS:
        content = {"application/json": {"schema": reference(schema)}} if schema else _LINES
        responses = {
            "200": answered(summary, content),
            **{status: response(status) for status in (*errors, *_FAILURES)},
        }
        described: JsonObject = {"operationId": operation, "summary": summary, "responses": responses}
        if operation in _BODIES:
            described = {**described, "requestBody": {"required": True, "content": _BODIES[operation]}}
        if operation in _QUERIES:
            described = {**described, "parameters": _query(_QUERIES[operation])}
        paths.setdefault(path, {})[method] = described
        if named := re.search(r"{(\w+)}", path):
            paths[path]["parameters"] = [{"name": named[1], "in": "path", "required": True, "schema": STRING}]
    return paths


def _query(query: type[Body]) -> list[JsonObject]:
    properties = body_schemas(query)[query.__name__]["properties"]
    # A query cannot contain null.
    kinds = {name: next(iter(schema.get("anyOf", [schema]))) for name, schema in properties.items()}
    return [{"name": name, "in": "query", "schema": kind} for name, kind in kinds.items()]


def batch_schemas() -> JsonObject:
    """Returns the OpenAPI schemas of files, batches and their lists."""
    file_id, batch_id = (
        {"type": "string", "pattern": f"^{prefix}[0-9a-f]{{{ID_DIGITS}}}$"} for prefix in (FILE, BATCH)
    )
    time: Schema = {"type": ["integer", "null"], "minimum": 0}
    return {
        **body_schemas(BatchRequest),
        "Batch": object_schema(
            id=batch_id,
            object={"enum": ["batch"]},
            endpoint=STRING,
            errors={"type": ["object", "null"]},
            input_file_id=file_id,
            completion_window=STRING,
            status={"enum": list(STATUSES)},
            output_file_id=NULLABLE_STRING,
            error_file_id=NULLABLE_STRING,
            created_at=COUNT,
            expires_at=COUNT,
            **{f"{status}_at": time for status in STATUSES[1:]},
            request_counts=object_schema(total=COUNT, completed=COUNT, failed=COUNT),
            metadata={"type": ["object", "null"]},
        ),
        "File": object_schema(
            id=file_id,
            object={"enum": ["file"]},
            bytes=COUNT,
            created_at=COUNT,
            filename=STRING,
            purpose={"enum": [PURPOSE, OUTPUT_PURPOSE]},
            status={"enum": ["processed"]},
            expires_at={"type": "null"},
        ),
        "DeletedFile": object_schema(id=file_id, object={"enum": ["file"]}, deleted={"type": "boolean"}),
        **{
            f"{name}List": object_schema(
                object={"enum": ["list"]},
                data={"type": "array", "items": reference(name)},
                first_id=NULLABLE_STRING,
                last_id=NULLABLE_STRING,
                has_more={"type": "boolean"},
            )
            for name in ("File", "Batch")
        },
    }
