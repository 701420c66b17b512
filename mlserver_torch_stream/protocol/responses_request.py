"""Reads the body of OpenAI's Responses API, by the table of its parameters, as the body of a chat.

What is not implemented is refused by name.

A parameter that means the same in a chat has the chat's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.chat import FUNCTION, MAX_TOOLS, parsed_arguments
from mlserver_torch_stream.protocol.constraints import NULLABLE_STRING, STRING, ElementBudget, Schema, check
from mlserver_torch_stream.protocol.openai_parameters import CHAT_PARAMETERS, Table, needs, refuses, takes
from mlserver_torch_stream.protocol.parameters import REASONING_EFFORTS
from mlserver_torch_stream.protocol.values import shown

INPUT = "input"
LOGPROBS = "message.output_text.logprobs"
_ITEMS: Schema = {
    "type": ["string", "array"],
    "minLength": 1,
    "minItems": 1,
    "items": {"type": "object"},
    "description": "a text, or items: message, function_call, function_call_output, reasoning",
}
_TOOLS: Schema = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "name"],
        "properties": {
            "type": {"type": "string", "enum": ["function"], "description": "only functions are implemented"},
            **FUNCTION["properties"],
        },
    },
}
_FORMAT: Schema = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "name": NULLABLE_STRING,
        "description": NULLABLE_STRING,
        "schema": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "additionalProperties": False,
}
_TEXT: Schema = {
    "type": "object",
    "properties": {"format": _FORMAT, "verbosity": {"enum": ["medium", None]}},
    "additionalProperties": False,
}
# No summary is made: "auto" leaves that to the server.
_REASONING: Schema = {
    "type": "object",
    "properties": {
        "effort": {"enum": [*REASONING_EFFORTS, None]},
        "summary": {"enum": ["auto", None]},
        "generate_summary": {"enum": ["auto", None]},
        "context": {"enum": ["auto", None]},
        "mode": {"enum": ["standard", None]},
    },
    "additionalProperties": False,
}
# An item of reasoning has its text, so that nothing has to be encrypted to come back.
_INCLUDE: Schema = {
    "type": "array",
    "items": {"type": "string", "enum": [LOGPROBS, "reasoning.encrypted_content"]},
    "maxItems": 16,
}
_METADATA: Schema = {"type": "object", "additionalProperties": STRING}
_STREAM_OPTIONS: Schema = {
    "type": "object",
    "properties": {"include_obfuscation": {"type": ["boolean", "null"]}},
    "additionalProperties": False,
}
_AS_IN_CHATS = (
    *("model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "tool_choice", "user"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("service_tier", "moderation"),
    # What OpenAI's own API lacks.
    *("stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "structured_outputs"),
    *("top_k", "min_p", "typical_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "chat_template_kwargs"),
    *("priority", "timeout", "model_version"),
)
_OWN = (
    needs(INPUT, _ITEMS),
    takes("instructions", STRING),
    takes("max_output_tokens", {"type": "integer", "minimum": 1}),
    takes("tools", _TOOLS),
    takes("text", _TEXT),
    takes("reasoning", _REASONING),
    takes("include", _INCLUDE),
    takes("metadata", _METADATA),
    takes("stream_options", _STREAM_OPTIONS),
    # The server keeps no responses.
    refuses("store", False),
    refuses("background", False),
    refuses("truncation", "disabled"),
    refuses("previous_response_id"),
    refuses("conversation"),
    refuses("prompt"),
    refuses("max_tool_calls"),
    refuses("context_management"),
    refuses("access_programs"),
    refuses("background_options"),
    refuses("image"),
)
RESPONSE_PARAMETERS: Table = {each.name: each for each in (*_OWN, *(CHAT_PARAMETERS[name] for name in _AS_IN_CHATS))}


_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
_PARTS: Schema = {"type": ["string", "array"], "items": {"type": "object"}}
_OF_EVERY_ITEM: Mapping[str, Schema] = {"type": STRING, "id": STRING, "status": STRING}


def _item(*required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**_OF_EVERY_ITEM, **properties},
        "additionalProperties": False,
    }


_KINDS: Mapping[str, Schema] = {
    "message": _item("role", "content", role={"type": "string", "minLength": 1}, content=_PARTS, phase=STRING),
    "function_call": _item("call_id", "name", "arguments", call_id=STRING, name=STRING, arguments=STRING),
    "function_call_output": _item("call_id", "output", call_id=STRING, output=_PARTS),
    "reasoning": _item(summary=_OBJECTS, content=_OBJECTS),
}
# What a name of a chat's body is called here, the longer names first.
_OWN_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", INPUT),
    ("max_tokens", "max_output_tokens"),
)


def own_name(field: str) -> str:
    """The client's name of the parameter that a chat's decoder calls ``field``."""
    for inner, own in _OWN_NAMES:
        if field == inner or field.startswith((f"{inner}.", f"{inner}[")):
            return own + field[len(inner) :]
    return field.replace("].function.", "].", 1) if field.startswith("tools[") else field


def chat_body(taken: Mapping[str, Any], most: int) -> dict[str, Any]:
    """``taken``: the parameters that the table has accepted; ``most``: elements of the input that are looked at. Raises
    InvalidInput."""
    body = {key: value for key, value in taken.items() if key not in _CONVERTED}
    body["messages"] = _messages(taken, most)
    body["n"] = 1  # also where the model's settings say more: a response is one answer
    if "max_output_tokens" in taken:
        body["max_tokens"] = taken["max_output_tokens"]
    if "tools" in taken:
        body["tools"] = [_tool(tool) for tool in taken["tools"]]
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


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": tool["type"], "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(said: Mapping[str, Any]) -> dict[str, Any]:
    kind, described = said["type"], {key: value for key, value in said.items() if key != "type" and value is not None}
    if kind == "json_schema":
        if "schema" not in described:
            raise InvalidInput("text.format.schema", "is needed")
        return {"type": kind, "json_schema": described}
    if described:
        raise InvalidInput(f"text.format.{next(iter(described))}", f"is not for a format of type {kind}")
    return {"type": kind}


def _messages(taken: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": taken["instructions"]}] if "instructions" in taken else []
    said = taken[INPUT]
    if isinstance(said, str):
        return [*first, {"role": "user", "content": said}]
    conversation = _Conversation(first, ElementBudget(most))
    for position, item in enumerate(said):
        conversation.add(f"{INPUT}[{position}]", item)
    return conversation.messages


class _Conversation:
    """The messages of the items so far. Reasoning, text and calls that follow each other are one message, as the
    assistant has said them in one answer."""

    def __init__(self, messages: Sequence[dict[str, Any]], budget: ElementBudget) -> None:
        self.messages = list(messages)
        self._budget = budget
        self._answer: dict[str, Any] | None = None  # the last message, while items may belong to it

    def add(self, place: str, item: Mapping[str, Any]) -> None:
        """Raises InvalidInput."""
        item = {key: value for key, value in item.items() if value is not None}  # as SDKs dump their objects
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidInput(f"{place}.type", f"must be {' or '.join(_KINDS)}, got {shown(kind)}")
        check(place, item, _KINDS[kind], self._budget)
        if kind == "reasoning":
            self._begin()["reasoning"] = self._reasoning(place, item)
        elif kind == "function_call":
            self._current().setdefault("tool_calls", []).append(_call(place, item))
        elif kind == "function_call_output":
            self._say("tool", self._text(f"{place}.output", item["output"]), tool_call_id=item["call_id"])
        elif item["role"] == "assistant":
            self._answer_with(self._text(f"{place}.content", item["content"]))
        else:
            self._say(item["role"], self._text(f"{place}.content", item["content"]))

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
        """A text after another text or after calls begins a new answer."""
        current = self._current()
        if current["content"] or "tool_calls" in current:
            current = self._begin()
        current["content"] = text

    def _reasoning(self, place: str, item: Mapping[str, Any]) -> str:
        """Where there is no text of it, its summary."""
        parts = "content" if item.get("content") else "summary"
        return self._text(f"{place}.{parts}", item.get(parts, []), f"{parts.replace('content', 'reasoning')}_text")

    def _text(self, place: str, content: str | list[dict[str, Any]], *kinds: str) -> str:
        if isinstance(content, str):
            return content
        kinds = kinds or ("input_text", "output_text", "text")
        return "".join(_part(f"{place}[{position}]", part, kinds) for position, part in enumerate(content))


def _part(place: str, part: Mapping[str, Any], kinds: Sequence[str]) -> str:
    check(f"{place}.type", part.get("type"), {"type": "string", "enum": list(kinds)})
    check(f"{place}.text", part.get("text"), STRING)
    return str(part["text"])


def _call(place: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """The item as a call in a chat's message, whose arguments are an object, as templates read them."""
    arguments = parsed_arguments(f"{place}.arguments", "", item["arguments"])
    return {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": arguments}}
