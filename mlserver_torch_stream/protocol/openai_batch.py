"""Reads the input lines of OpenAI's batches, builds their output lines, and joins streamed chunks into whole objects.

Unknown fields of a chunk are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mlserver_torch_stream.errors import InvalidInput, UnknownModel
from mlserver_torch_stream.protocol.openai_request import MESSAGES, PROMPT
from mlserver_torch_stream.protocol.responses_request import INPUT
from mlserver_torch_stream.protocol.values import is_text, refuse, shown

_GENERATE_PROMPT = "text_input"  # the prompt's name in the generate extension
_PROMPTS = (MESSAGES, PROMPT, INPUT, _GENERATE_PROMPT)
_LINE = ("custom_id", "method", "url", "body")
_ENDPOINTS = {"/v1/chat/completions": MESSAGES, "/v1/completions": PROMPT, "/v1/responses": INPUT}
# For each kind of object, the prefix of its id and the key of its time.
_HEADS = {
    "chat.completion": ("chatcmpl-", "created"),
    "text_completion": ("cmpl-", "created"),
    "response": ("resp_", "created_at"),
}
_OUTPUT_LINE = ("id", "custom_id", "response", "error")
OK = 200


def read_custom_id(line: Mapping[str, Any], fallback: str) -> str:
    """Returns the line's ``custom_id``, or ``fallback`` if it has none. Raises InvalidInput if it is not a string."""
    custom_id = line.get("custom_id", fallback)
    if not is_text(custom_id):
        raise InvalidInput("custom_id", f"must be a string, got {shown(custom_id)}")
    return str(custom_id)


def read_body(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request in a line; its prompt is in ``messages``, ``prompt`` or ``input``.

    A line without ``body`` is itself the request, except for the key ``custom_id``. Raises InvalidInput.
    """
    if "body" not in line:
        return _checked({key: value for key, value in line.items() if key != "custom_id"})
    for key, value in line.items():
        if key not in _LINE:
            refuse(key, value, _LINE, what="key of a batch line")
    if line.get("method", "POST") != "POST":
        raise InvalidInput("method", f"must be POST, got {shown(line['method'])}")
    if not isinstance(line["body"], dict):
        raise InvalidInput("body", f"must be an object, got {shown(line['body'])}")
    body = _checked(line["body"])
    if "url" in line:
        _check_url(line["url"], body)
    return body


def check_model(body: Mapping[str, Any], served: Collection[str]) -> None:
    """Raises UnknownModel if the request names a model that is not in ``served``."""
    name = body.get("model")
    if name is None:
        return
    if not is_text(name):
        raise InvalidInput("model", f"must be a string, got {shown(name)}")
    if name not in served:
        raise UnknownModel(name)


def answer_line(
    name: str, custom_id: str, body: Mapping[str, Any], created: int, place: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the output line of a request that was answered.

    The line's ids are made from ``name``. ``place`` holds keys that OpenAI's lines do not have. ``created``, in seconds
    since the epoch, is written into the body if the body is an OpenAI object.
    """
    known = _HEADS.get(str(body.get("object")))
    if known is not None:
        prefix, time = known
        head = {"id": f"{prefix}{name}", "object": body["object"], time: created}
        body = {**head, **{key: value for key, value in body.items() if key not in head}}
    return _line(name, custom_id, place, _response(name, OK, body), None)


def refused_line(
    name: str, custom_id: str, status: int, error: Mapping[str, Any], place: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the output line of a request that was refused with a status and an error object."""
    return _line(name, custom_id, place, _response(name, status, {"error": error}), None)


def lost_line(name: str, custom_id: str, code: str, message: str, place: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the output line of a request that was never sent to a model."""
    return _line(name, custom_id, place, None, {"code": code, "message": message})


def plain_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an output line without the keys that OpenAI's lines do not have."""
    return {key: line[key] for key in _OUTPUT_LINE}


def is_answered(line: Mapping[str, Any]) -> bool:
    """Whether an output line has an answer, not an error."""
    return line["error"] is None and line["response"]["status_code"] == OK


def _response(name: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{name}", "body": body}


def _line(name: str, custom_id: str, place: Mapping[str, Any], response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{name}", "custom_id": custom_id, **place, "response": response, "error": error}


def _checked(body: Mapping[str, Any]) -> dict[str, Any]:
    given = [name for name in _PROMPTS if name in body]
    if len(given) != 1:
        named = given[1] if given else MESSAGES
        raise InvalidInput(
            named, f"exactly one of {', '.join(_PROMPTS)} is needed, got {' and '.join(given) or 'none'}"
        )
    _check_prompt(given[0], body[given[0]])
    stream = body.get("stream")
    if stream is not None and stream is not False:
        raise InvalidInput("stream", f"must be false, as a row is answered as a whole; got {shown(stream)}")
    return {PROMPT if key == _GENERATE_PROMPT else key: value for key, value in body.items()}


def _check_prompt(name: str, value: Any) -> None:
    if name == INPUT and isinstance(value, list) and value:
        return
    if name == MESSAGES:
        if not isinstance(value, list) or not value:
            raise InvalidInput(name, f"must be a list of at least one message, got {shown(value)}")
    elif not isinstance(value, str):
        allowed = "a string or a list of at least one item" if name == INPUT else "a string"
        raise InvalidInput(name, f"must be {allowed}, got {shown(value)}")


def _check_url(url: Any, body: Mapping[str, Any]) -> None:
    needed = _ENDPOINTS.get(url) if isinstance(url, str) else None
    if needed is None:
        raise InvalidInput("url", f"must be one of {', '.join(_ENDPOINTS)}, got {shown(url)}")
    if needed not in body:
        raise InvalidInput("url", f"{url} needs {needed} in the body")


_WHOLE = {"chat.completion.chunk": "chat.completion"}
_SAID_ONCE = frozenset({"id", "type", "role", "name", "finish_reason", "object"})  # strings that are never in pieces


class ChunkFold:
    """Joins the chunks of a stream into the whole answer.

    An object that is not a chunk raises KeyError, TypeError or AttributeError.
    """

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Joins one chunk to the answer."""
        for key, value in chunk.items():
            if key != "choices" and (value is not None or key not in self._head):
                self._head[key] = value
        for choice in chunk["choices"]:
            _merge(self._choices.setdefault(choice["index"], {"index": choice["index"]}), choice)

    def whole(self) -> dict[str, Any]:
        """Returns the whole answer, whose choices have ``message`` instead of ``delta``."""
        kind = self._head.get("object")
        head = {**self._head, "object": _WHOLE.get(kind, kind)} if kind is not None else self._head
        return {**head, "choices": [_choice(self._choices[index]) for index in sorted(self._choices)]}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    delta = choice.pop("delta", None)
    if delta is None:
        return choice
    calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.get("tool_calls") or ()]
    message = {"role": "assistant", "content": None, **delta, **({"tool_calls": calls} if calls else {})}
    return {"index": choice["index"], "message": message, **choice}


def _merge(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for key, value in piece.items():
        known = whole.get(key)
        if known is None:
            whole[key] = _copy(value)
        elif value is None:
            continue
        elif isinstance(known, dict):
            _merge(known, value)
        elif isinstance(known, list):
            _extend(known, value)
        elif isinstance(known, str):
            whole[key] = known or value if key in _SAID_ONCE else known + value
        else:
            whole[key] = value


def _extend(whole: list[Any], piece: list[Any]) -> None:
    """Appends a list. An element with an ``index``, such as a tool call, is merged with the earlier element of the same
    index.
    """
    for element in piece:
        index = element.get("index") if isinstance(element, dict) else None
        known = next((each for each in whole if index is not None and each.get("index") == index), None)
        if known is None:
            whole.append(_copy(element))
        else:
            _merge(known, element)


def _copy(value: Any) -> Any:
    """Copies a value, so that later chunks can be merged into the copy."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list):
        merged: list[Any] = []
        _extend(merged, value)
        return merged
    return value
