"""Builds the OpenAPI document of the paths below ``/v1`` from the models that the decoders use."""

from __future__ import annotations

from collections.abc import Mapping

from mlserver_torch_stream.protocol.anthropic_models import CountTokensRequest, MessagesRequest
from mlserver_torch_stream.protocol.openai_batch_models import batch_paths, batch_schemas
from mlserver_torch_stream.protocol.openai_models import ChatCompletionRequest, CompletionRequest, ModelResponseRequest
from mlserver_torch_stream.protocol.openapi_parts import (
    COUNT,
    NULLABLE_STRING,
    REQUEST_ID,
    STRING,
    Schema,
    answered,
    body_schemas,
    object_schema,
    reference,
    response,
)
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.version import __version__

_OBJECT: Schema = {"type": "object"}
_OPTIONAL_OBJECT: Schema = {"type": ["object", "null"]}
_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete", "failed"]}
_ITEM_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}


def response_schemas() -> JsonObject:
    """Returns the OpenAPI schemas of the replies of ``/v1/responses``."""
    items = [
        reference(name)
        for name in ("MessageItem", "ReasoningItem", "FunctionCallItem", "CustomCallItem", "WarningItem")
    ]
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
        "WarningItem": _item("warning", message=STRING),
        "CustomCallItem": _item("custom_tool_call", call_id=STRING, name=STRING, input=STRING),
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


_DESCRIPTION = """OpenAI's and Anthropic's APIs as this server implements them, also below /openai/v1.
A value that the schema excludes is refused with status 400 and the name of its parameter. So is a parameter that is not
listed, unless the server's setting unknown_parameters is ignore."""
_FINISH_REASON: Schema = {"enum": ["stop", "length", "tool_calls", None]}
_REASONING: Mapping[str, Schema] = {"reasoning": STRING, "reasoning_content": STRING}
_ERRORS = {
    "400": "Bad input: `param` names the parameter.",
    "404": "No model has this name or version; no file or batch has this id, or the server keeps none.",
    "413": "The body is too large.",
    "415": "The body has a Content-Encoding other than gzip.",
    "429": "The queue is full.",
    "500": "The generation failed.",
    "503": "The model is loading, or the server is shutting down.",
    "507": "The store of files and batches is full.",
    "504": "The request's time limit passed before its first token.",
}
_RETRY_AFTER: JsonObject = {"description": "In seconds; sent with 429 and 503.", "schema": COUNT}


def openai_document() -> JsonObject:
    """Returns the OpenAPI document, version 3.1, of all paths below ``/v1``."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlserver-torch-stream", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}, {"url": "/openai"}],
        "paths": {
            "/v1/chat/completions": _generating("createChatCompletion", "Answers a conversation.", "ChatCompletion"),
            "/v1/completions": _generating("createCompletion", "Continues texts.", "Completion"),
            "/v1/responses": _generating(
                *("createResponse", "Answers an input with output items.", "ModelResponse"),
                events="A ModelResponseEvent as JSON, whose type is also the name of the event.",
            ),
            "/v1/messages": _anthropic(
                *("createMessage", "Answers a conversation, as Anthropic's API does.", "MessagesRequest"),
                {"application/json": {"schema": reference("AnthropicMessage")}, "text/event-stream": _EVENTS},
            ),
            "/v1/messages/count_tokens": _anthropic(
                *("countTokens", "Counts the tokens of a conversation.", "CountTokensRequest"),
                {"application/json": {"schema": object_schema(input_tokens=COUNT)}},
            ),
            "/v1/models": _reading("listModels", "The models that generate tokens.", "ModelList"),
            "/v1/models/{model}": {
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": STRING}],
                **_reading("retrieveModel", "One model.", "Model", "404"),
            },
            **batch_paths(),
        },
        "components": {"schemas": _schemas(), "responses": {status: _error(status) for status in _ERRORS}},
    }


def _generating(operation: str, summary: str, name: str, events: str = "") -> JsonObject:
    """Returns an operation that generates. ``events`` describes the data of the stream's events (default: chunks)."""
    whole = {"schema": reference(name)}
    data = {"type": "string", "description": events or f"A {name}Chunk as JSON, an Error as JSON, or [DONE]."}
    streamed = {"schema": {"type": "object", "required": ["data"], "properties": {"data": data}}}
    summary_of_both = "The whole answer, or its events if `stream` is true."
    both = answered(summary_of_both, {"application/json": whole, "text/event-stream": streamed})
    body = {"required": True, "content": {"application/json": {"schema": reference(f"{name}Request")}}}
    responses = {"200": both, **{status: response(status) for status in _ERRORS}}
    return {"post": {"operationId": operation, "summary": summary, "requestBody": body, "responses": responses}}


_EVENT = {"type": "string", "description": "An event as JSON, whose type is also its name."}
_EVENTS: JsonObject = {"schema": object_schema(data=_EVENT)}


def _anthropic(operation: str, summary: str, body: str, content: JsonObject) -> JsonObject:
    described = {"required": True, "content": {"application/json": {"schema": reference(body)}}}
    answers: JsonObject = {"200": answered(summary, content)}
    for status in _ERRORS:
        answers[status] = {**_error(status), "content": {"application/json": {"schema": reference("AnthropicError")}}}
    return {"post": {"operationId": operation, "summary": summary, "requestBody": described, "responses": answers}}


def _reading(operation: str, summary: str, name: str, *errors: str) -> JsonObject:
    whole = answered(summary, {"application/json": {"schema": reference(name)}})
    responses = {"200": whole, **{status: response(status) for status in errors}}
    return {"get": {"operationId": operation, "summary": summary, "responses": responses}}


def _error(status: str) -> JsonObject:
    return {
        "description": _ERRORS[status],
        "headers": {"x-request-id": REQUEST_ID, "retry-after": _RETRY_AFTER},
        "content": {"application/json": {"schema": reference("Error")}},
    }


def _schemas() -> JsonObject:
    return {
        **body_schemas(
            *(ChatCompletionRequest, CompletionRequest, ModelResponseRequest, MessagesRequest, CountTokensRequest)
        ),
        **response_schemas(),
        "AnthropicMessage": object_schema(
            id=STRING,
            type={"enum": ["message"]},
            role={"enum": ["assistant"]},
            model=STRING,
            content={"type": "array", "items": object_schema(type={"enum": ["text", "thinking", "tool_use"]})},
            stop_reason=NULLABLE_STRING,
            stop_sequence=NULLABLE_STRING,
            usage=object_schema(input_tokens=COUNT, output_tokens=COUNT, cache_read_input_tokens=COUNT),
        ),
        "AnthropicError": object_schema(type={"enum": ["error"]}, error=object_schema(type=STRING, message=STRING)),
        "ChatCompletion": _answer("chat.completion", message=reference("Message"), usage=True),
        "ChatCompletionChunk": _answer("chat.completion.chunk", delta=reference("Delta"), usage=False),
        "Completion": _answer("text_completion", text=STRING, usage=True),
        "CompletionChunk": _answer("text_completion", text=STRING, usage=False),
        "Message": _with(
            object_schema(role={"enum": ["assistant"]}, content=NULLABLE_STRING),
            **_REASONING,
            tool_calls={"type": "array", "items": reference("ToolCall")},
        ),
        "Delta": _with(
            {"type": "object"},
            role={"enum": ["assistant"]},
            content=STRING,
            **_REASONING,
            tool_calls={"type": "array", "items": reference("ToolCallDelta")},
        ),
        "ToolCall": object_schema(
            id=STRING, type={"enum": ["function"]}, function=object_schema(name=STRING, arguments=STRING)
        ),
        "ToolCallDelta": _with(
            object_schema(index=COUNT, function=_with(object_schema(arguments=STRING), name=STRING)),
            id=STRING,
            type={"enum": ["function"]},
        ),
        "Usage": _with(
            object_schema(
                prompt_tokens=COUNT,
                completion_tokens=COUNT,
                total_tokens=COUNT,
                prompt_tokens_details=object_schema(cached_tokens=COUNT),
            ),
            completion_tokens_details=object_schema(reasoning_tokens=COUNT),
        ),
        "Model": {
            **object_schema(id=STRING, object={"enum": ["model"]}, created=COUNT, owned_by=STRING),
            "description": "Once it is loaded: `max_model_len`, the tokens of its context, and `has_chat_template`.",
        },
        "ModelList": object_schema(object={"enum": ["list"]}, data={"type": "array", "items": reference("Model")}),
        **batch_schemas(),
        "Error": object_schema(
            error=object_schema(message=STRING, type=STRING, param=NULLABLE_STRING, code=NULLABLE_STRING),
        ),
    }


def _with(described: JsonObject, **optional: Schema) -> JsonObject:
    return {**described, "properties": {**described.get("properties", {}), **optional}}


def _answer(kind: str, *, usage: bool, **text: Schema) -> JsonObject:
    """Returns the schema of an object of OpenAI's API. ``text`` is the schema of a choice's text.

    With ``usage`` the object always has the field ``usage``; a chunk has it only if ``stream_options`` asks for it.
    """
    choice = object_schema(index=COUNT, logprobs={"type": ["object", "null"]}, finish_reason=_FINISH_REASON, **text)
    fields: dict[str, Schema] = {"id": STRING, "object": {"enum": [kind]}, "created": COUNT, "model": STRING}
    fields["choices"] = {"type": "array", "items": choice}
    if usage:
        return object_schema(**fields, usage=reference("Usage"))
    return _with(object_schema(**fields), usage={"anyOf": [reference("Usage"), {"type": "null"}]})
