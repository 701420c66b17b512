"""Translates the body of Anthropic's Messages API into the body of a chat completion."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import ModelInfo

# Parameters' names in a chat's body, and their names in Anthropic's body; longer names come first.
_OWN_NAMES = (
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("stop", "stop_sequences"),
)
_OF_A_TOOL = re.compile(r"(tools\[\d+\])\.function\.(name|description|parameters|strict)")
_OWN_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = frozenset({"reasoning_effort", "enable_thinking"})
_CONVERTED = frozenset({"messages", "system", "tools", "tool_choice", "output_config", "stop_sequences"})


def own_name(field: str) -> str:
    """Returns the name in Anthropic's body of the parameter that is called ``field`` in a chat's body."""
    for inner, own in _OWN_NAMES:
        if field == inner or field.startswith((f"{inner}.", f"{inner}[")):
            return own + field[len(inner) :]
    return _OF_A_TOOL.sub(_name_in_tool, field)


def _name_in_tool(match: re.Match[str]) -> str:
    return f"{match[1]}.{'input_schema' if match[2] == 'parameters' else match[2]}"


def chat_body(taken: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """Returns the chat's body. ``taken`` holds the parameters that ``MessagesRequest`` has validated.

    Raises InvalidInput.
    """
    body = {key: value for key, value in taken.items() if key not in _CONVERTED}
    body["messages"] = list(_messages(taken))
    body["n"] = 1  # whatever the model's default is, since an answer is one message
    if "stop_sequences" in taken:
        if "stop" in taken:
            raise InvalidInput("stop", "contradicts stop_sequences, which is the same parameter")
        body["stop"] = taken["stop_sequences"]
    if "tools" in taken:
        body["tools"] = [_tool(tool) for tool in taken["tools"]]
    if "tool_choice" in taken:
        body.update(_tool_choice(_said(taken["tool_choice"])))
    output = _said(taken.get("output_config", {}))
    if "effort" in output and (info.reasons or info.template_arguments & _EFFORTS):  # others have no effort to set
        body["reasoning_effort"] = output["effort"]
    if "format" in output:
        schema = {"schema": output["format"]["schema"]}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _said(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object without nulls, which SDKs write for absent fields."""
    return {key: each for key, each in value.items() if each is not None}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if choice["type"] != "tool":
        return {**parallel, "tool_choice": _OWN_CHOICES[choice["type"]]}
    if "name" not in choice:
        raise InvalidInput("tool_choice.name", "is needed")
    return {**parallel, "tool_choice": {"type": "function", "function": {"name": choice["name"]}}}


def _messages(taken: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if taken.get("system"):
        yield {"role": "system", "content": _text(taken["system"], "\n")}
    for position, message in enumerate(taken["messages"]):
        content = message["content"]
        if message["role"] == "assistant":
            yield _answer(f"messages[{position}]", content)
        elif isinstance(content, str):
            yield {"role": message["role"], "content": content}
        else:
            yield from _turn(f"messages[{position}]", message["role"], content)


def _text(content: Any, between: str = "") -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else between.join(block["text"] for block in content)


def _answer(place: str, content: Any) -> dict[str, Any]:
    """Joins the blocks of one answer into one message."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    message: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(content):
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "thinking":
            thoughts.append(block["thinking"])
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        else:
            raise _misplaced(f"{place}.content[{number}]", block, "assistant")
    message["content"] = "".join(texts)
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _turn(place: str, role: str, blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields one message for each result of a tool, and one for each run of consecutive texts."""
    texts: list[str] = []
    for number, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "tool_result" and role == "user":
            if texts:
                yield {"role": role, "content": "".join(texts)}
                texts = []
            failed = {"is_error": True} if block.get("is_error") else {}
            result = _text(block.get("content"))
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result, **failed}
        else:
            raise _misplaced(f"{place}.content[{number}]", block, role)
    if texts or not blocks:
        yield {"role": role, "content": "".join(texts)}


def _misplaced(place: str, block: Mapping[str, Any], role: str) -> InvalidInput:
    return InvalidInput(f"{place}.type", f"a message of the {role} may not have a block of type {block['type']}")
