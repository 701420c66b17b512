"""The part of the OpenAPI document that describes responses and the events of their streams.

Knows nothing of requests, which the table of parameters describes.
"""

from __future__ import annotations

from mlserver_torch_stream.protocol.json_schema import STRING, Schema
from mlserver_torch_stream.protocol.openapi_parts import COUNT, object_schema, reference
from mlserver_torch_stream.protocol.spelling import JsonObject

_OBJECT: Schema = {"type": "object"}
_OPTIONAL_OBJECT: Schema = {"type": ["object", "null"]}
_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete", "failed"]}
_ITEM_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}


def response_schemas() -> JsonObject:
    items = [reference(name) for name in ("MessageItem", "ReasoningItem", "FunctionCallItem")]
    return {
        "ModelResponse": object_schema(
            id=STRING,
            object={"enum": ["response"]},
            created_at=COUNT,
            status=_STATUS,
            error=_OPTIONAL_OBJECT,
            incomplete_details={"anyOf": [object_schema(reason={"enum": ["max_output_tokens"]}), {"type": "null"}]},
            model=STRING,
            output={"type": "array", "items": {"anyOf": items}},
            usage={"anyOf": [reference("ResponseUsage"), {"type": "null"}]},
        ),
        "MessageItem": _item("message", role={"enum": ["assistant"]}, content=_parts("output_text", annotations=True)),
        "ReasoningItem": _item(
            "reasoning", summary={"type": "array", "items": _OBJECT}, content=_parts("reasoning_text")
        ),
        "FunctionCallItem": _item("function_call", call_id=STRING, name=STRING, arguments=STRING),
        "ResponseUsage": object_schema(
            input_tokens=COUNT,
            input_tokens_details=object_schema(cached_tokens=COUNT, cache_write_tokens=COUNT),
            output_tokens=COUNT,
            output_tokens_details=object_schema(reasoning_tokens=COUNT),
            total_tokens=COUNT,
        ),
        "ModelResponseEvent": {
            **object_schema(type=STRING, sequence_number=COUNT),
            "description": (
                "An event of a stream. The last one has the whole response: response.completed, response.incomplete, "
                "or response.failed, which an event of type error follows."
            ),
        },
    }


def _item(kind: str, **more: Schema) -> JsonObject:
    return object_schema(id=STRING, type={"enum": [kind]}, status=_ITEM_STATUS, **more)


def _parts(kind: str, *, annotations: bool = False) -> JsonObject:
    more = {name: {"type": "array", "items": _OBJECT} for name in ("annotations", "logprobs") if annotations}
    return {"type": "array", "items": object_schema(type={"enum": [kind]}, text=STRING, **more)}
