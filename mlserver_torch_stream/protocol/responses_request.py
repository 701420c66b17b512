"""Translates the body of OpenAI's Responses API into the body of a chat completion.

A parameter that also exists for chats is handled by the chat's row in the parameter table. Parameters that are not
implemented are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import custom_tools
from mlserver_torch_stream.protocol.chat import parsed_arguments
from mlserver_torch_stream.protocol.custom_tools import function_name, functions
from mlserver_torch_stream.protocol.openai_models import LOGPROBS

INPUT = "input"
# The names of a chat's body, and the names of the same parameters here; longer names come first.
_OWN_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", INPUT),
    ("max_tokens", "max_output_tokens"),
)


def own_name(field: str) -> str:
    """Returns the name in the client's body of the parameter that is called ``field`` in a chat's body."""
    for inner, own in _OWN_NAMES:
        if field == inner or field.startswith((f"{inner}.", f"{inner}[")):
            return own + field[len(inner) :]
    return field.replace("].function.", "].", 1) if field.startswith("tools[") else field


def chat_body(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat's body. ``taken`` holds the parameters that ``ModelResponseRequest`` has validated.

    Raises InvalidInput.
    """
    body = {key: value for key, value in taken.items() if key not in _CONVERTED}
    body["messages"] = _messages(taken)
    body["n"] = 1  # whatever the model's default is, since a response is one answer
    if "max_output_tokens" in taken:
        body["max_tokens"] = taken["max_output_tokens"]
    if "tools" in taken:
        body["tools"] = functions(taken["tools"])
    if "tool_choice" in taken:
        body["tool_choice"] = _tool_choice(taken["tool_choice"])
    if taken.get("text", {}).get("format"):
        body["response_format"] = _response_format(taken["text"]["format"])
    if taken.get("reasoning", {}).get("effort") is not None:
        body["reasoning_effort"] = taken["reasoning"]["effort"]
    if LOGPROBS in taken.get("include", ()):
        body["logprobs"] = True
    elif taken.get("top_logprobs"):
        raise InvalidInput("top_logprobs", f"needs {LOGPROBS} in include")
    return body


_CONVERTED = frozenset(
    {INPUT, "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include", "metadata"}
)


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(said: Mapping[str, Any]) -> dict[str, Any]:
    kind, described = said["type"], {key: value for key, value in said.items() if key != "type" and value is not None}
    if kind == "json_schema":
        if "schema" not in described:
            raise InvalidInput("text.format.schema", "is needed")
        return {"type": kind, "json_schema": described}
    if described:
        raise InvalidInput(f"text.format.{next(iter(described))}", f"cannot be set for a format of type {kind}")
    return {"type": kind}


def _messages(taken: Mapping[str, Any]) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": taken["instructions"]}] if "instructions" in taken else []
    said = taken[INPUT]
    if isinstance(said, str):
        return [*first, {"role": "user", "content": said}]
    conversation = _Conversation(first)
    for position, item in enumerate(said):
        conversation.add(f"{INPUT}[{position}]", item)
    return conversation.messages


class _Conversation:
    """Builds a chat's messages from the input items.

    Consecutive items of reasoning, text and calls become one message, because they are parts of the same answer.
    """

    def __init__(self, messages: Sequence[dict[str, Any]]) -> None:
        self.messages = list(messages)
        self._answer: dict[str, Any] | None = None  # the last message, as long as further items may belong to it

    def add(self, place: str, item: Mapping[str, Any]) -> None:
        """Adds an item. Raises InvalidInput, whose field begins with ``place``."""
        item = {key: value for key, value in item.items() if value is not None}  # SDKs write absent fields as null
        kind = item.get("type", "message")
        if kind == "warning":
            return
        if kind == "reasoning":
            self._begin()["reasoning"] = _text(item.get("content") or item.get("summary", []))
        elif kind in ("function_call", "custom_tool_call"):
            self._current().setdefault("tool_calls", []).append(_call(place, item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._say("tool", _text(item["output"]), tool_call_id=item["call_id"])
        elif item["role"] == "assistant":
            self._answer_with(_text(item["content"]))
        else:
            self._say(item["role"], _text(item["content"]))

    def _say(self, role: str, content: str, **more: Any) -> None:
        self._answer = None
        self.messages.append({"role": role, "content": content, **more})

    def _begin(self) -> dict[str, Any]:
        self._answer = {"role": "assistant", "content": ""}
        self.messages.append(self._answer)
        return self._answer

    def _current(self) -> dict[str, Any]:
        return self._begin() if self._answer is None else self._answer

    def _answer_with(self, text: str) -> None:
        """Adds a text to the answer; after another text or a call it begins a new answer."""
        current = self._current()
        if current["content"] or "tool_calls" in current:
            current = self._begin()
        current["content"] = text


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _call(place: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the item as a call in a chat's message, with its arguments parsed, as templates read them."""
    if item["type"] == "custom_tool_call":
        arguments = {custom_tools.INPUT: item["input"]}
    else:
        arguments = parsed_arguments(f"{place}.arguments", "", item["arguments"])
    name = function_name(item["name"], item.get("namespace"))
    return {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}
