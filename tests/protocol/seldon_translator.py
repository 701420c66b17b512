"""How Seldon Core 2's agent translates an OpenAI chat request to V2, and the V2 reply back.

The rules are those of scheduler/pkg/translator in https://github.com/SeldonIO/seldon-core as of January 2026,
implemented again. Knows nothing of this project's protocol, nor of how requests are sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SCANNER_BYTES = 64 * 1024  # the longest event with its end that Go's line scanner reads
_EVENT_END = b"\n\n"
_PREFIX = "data: "
_ENDPOINTS = ("/infer_stream", "/infer")
_CHAT = "/chat/completions"
NOT_PARAMETERS = ("model", "messages", "tools", "parallel_tool_calls", "tool_choice")


class Untranslatable(Exception):
    """The client gets this text with status 400 for a request, 500 for a reply; a stream that has begun breaks off."""


# --- requests ---


def v2_path(path: str) -> str:
    """Returns the path without the parts that an OpenAI client adds to its base URL."""
    for endpoint in _ENDPOINTS:
        before, found, behind = path.partition(endpoint)
        if found:
            if behind != _CHAT:
                raise Untranslatable(f"{behind} is not translated")
            return before + endpoint
    raise Untranslatable("the path has no endpoint of V2")


def v2_request(path: str, raw: bytes) -> dict[str, Any]:
    """Returns the V2 request to which an OpenAI request for this path is translated."""
    body = _object(raw)
    _check_model(path, body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Untranslatable("messages is no list of objects")
    inputs = list(_message_tensors(messages))
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        inputs.append(_tensor("tools", [_text(tool) for tool in tools]))
        inputs += [_tensor(key, [_text(body[key])]) for key in ("parallel_tool_calls", "tool_choice") if key in body]
    parameters = {key: value for key, value in body.items() if key not in NOT_PARAMETERS}
    return {"inputs": inputs, "parameters": {"llm_parameters": parameters, "kwargs": parameters}}


def _check_model(path: str, body: Mapping[str, Any]) -> None:
    """The name in the path has a version after its first underscore."""
    loaded = path.partition("/v2/models/")[2].partition("/")[0].partition("_")[0]
    if not isinstance(body.get("model"), str) or body["model"] != loaded:
        raise Untranslatable(f"model {body.get('model')} is not loaded at {path}")


def _message_tensors(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields one tensor for each field, unless all its elements are empty."""
    if not messages:
        raise Untranslatable("there is no message")
    parts = [_parts(message) for message in messages]
    columns: dict[str, list[Any]] = {
        "role": [_string(message.get("role"), "role") for message in messages],
        "content": [[content for content, _ in each] for each in parts],
        "type": [[kind for _, kind in each] for each in parts],
        "tool_calls": [_tool_calls(message) for message in messages],
        "tool_call_id": [_or_empty(message.get("tool_call_id")) for message in messages],
    }
    for name, column in columns.items():
        elements = _only(column[0]) if len(column) == 1 else [_cell(cell) for cell in column]
        if any(elements):
            yield _tensor(name, elements)


def _only(cell: str | list[str]) -> list[str]:
    """Returns the elements of a single message, unchanged."""
    return [cell] if isinstance(cell, str) else cell


def _cell(cell: str | list[str]) -> str:
    """Returns an element of several messages: a string unchanged, a list as JSON, an empty list as an empty string."""
    return cell if isinstance(cell, str) else _text(cell) if cell else ""


def _parts(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns content and type of each part. An element that is not an object becomes an empty part without a type."""
    content = message.get("content")
    if content is None:
        return [("", "text")]
    if isinstance(content, str):
        return [(content, "text")]
    if not isinstance(content, list):
        raise Untranslatable("content is neither text nor a list")
    return [_part(part) if isinstance(part, dict) else ("", "") for part in content]


def _part(part: Mapping[str, Any]) -> tuple[str, str]:
    kind = _string(part.get("type"), "type")
    held = part.get(kind)
    if not isinstance(held, (str, dict)):
        raise Untranslatable(f"a part of type {kind} has no {kind}")
    return _text(held), kind


def _tool_calls(message: Mapping[str, Any]) -> list[str]:
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise Untranslatable("tool_calls is no list")
    return [json.dumps(call) for call in calls]


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Untranslatable(f"{name} is no string")
    return value


def _or_empty(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tensor(name: str, elements: list[str]) -> dict[str, Any]:
    return {"name": name, "shape": [len(elements)], "datatype": "BYTES", "data": elements}


# --- replies ---


def openai_body(raw: bytes) -> bytes:
    """Returns the body for a reply that is not a stream, whatever its status."""
    reply = _object(raw)
    try:
        return _output_all(reply).encode()
    except Untranslatable:
        return json.dumps(_made_up(reply, "chat.completion", "message")).encode()


def openai_events(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the events of a stream, each as soon as it is complete."""
    for number, event in enumerate(_scan(chunks)):
        message = _object(event.decode().removeprefix(_PREFIX).encode())
        try:
            content = _output_all(message)
        except Untranslatable:
            if number:
                raise
            content = json.dumps(_made_up(message, "chat.completion.chunk", "delta"))
        yield f"{_PREFIX}{content}".encode() + _EVENT_END


def _scan(chunks: Iterable[bytes]) -> Iterator[bytes]:
    held = b""
    for chunk in chunks:
        held += chunk
        while _EVENT_END in held:
            event, _, held = held.partition(_EVENT_END)
            if len(event) + len(_EVENT_END) > SCANNER_BYTES:
                raise Untranslatable(f"an event has {len(event)} bytes")
            yield event
    if held:
        yield held


def _output_all(reply: Mapping[str, Any]) -> str:
    return _first_element(reply, "output_all")


def _first_element(reply: Mapping[str, Any], name: str) -> str:
    outputs = reply.get("outputs")
    if not isinstance(outputs, list):
        raise Untranslatable("`outputs` field not found or not an array in the response")
    for output in outputs:
        if output["name"] == name:
            return _string(output["data"][0], name)
    raise Untranslatable(f"output tensor with name {name} not found")


def _made_up(reply: Mapping[str, Any], kind: str, key: str) -> dict[str, Any]:
    """Returns an object for a reply without ``output_all``: it has no finish reason, no usage and no time."""
    message = {name: _first_element(reply, name) for name in ("role", "content")}
    head = {"id": _string(reply.get("id"), "id"), "model": _string(reply.get("model_name"), "model_name")}
    return {**head, "created": 0, "object": kind, "choices": [{"index": 0, key: message}]}


def _object(raw: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(raw)
    except ValueError as error:
        raise Untranslatable(f"no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise Untranslatable("no JSON object")
    return parsed
