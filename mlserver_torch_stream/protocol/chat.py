"""Validates a conversation: its messages, which are as in OpenAI's API, the tools that the answer may call, and the
template's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Len, MaxLen
from pydantic import TypeAdapter

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.bodies import (
    FAIL_FAST,
    SPENDS,
    Because,
    Body,
    ElementBudget,
    JsonObject,
    NonEmpty,
    OrList,
    Text,
    fields,
    validate,
)
from mlserver_torch_stream.protocol.constraints import check_finite
from mlserver_torch_stream.protocol.values import Merged, is_text, parse_json, shown
from mlserver_torch_stream.tool_calls import ToolChoice
from mlserver_torch_stream.types import ModelInfo

_NO_PARSER = "none"
MAX_TOOLS = 128
MAX_NAME = 64  # characters of a role
MAX_TOOL_NAME = 128
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class Tool(Body, extra="ignore"):
    """A tool; only functions are implemented."""

    type: Annotated[Literal["function"], Because("only functions are implemented")]


class ToolFunction(Body, extra="ignore"):
    """A function that the answer may call."""

    name: Annotated[str, Len(1, MAX_TOOL_NAME)]
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionTool(Tool):
    """A function, in the form of chat completions."""

    function: ToolFunction


FunctionTools = Annotated[list[FunctionTool], MaxLen(MAX_TOOLS), FAIL_FAST]
_TOOLS = TypeAdapter(FunctionTools)

Objects = Annotated[list[JsonObject], FAIL_FAST, SPENDS]


class TextPart(Body, extra="ignore"):
    """A part of a message's content; only text is implemented."""

    type: Annotated[Literal["text"], Because("only parts of text are implemented")]
    text: Text


class MessageMetadata(Body):
    """Fields that proxies and SDKs add to an answer, and then send back in the conversation. Chat templates do not see
    them.
    """

    provider_specific_fields: Any = None
    cache_control: Any = None
    id: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None  # LiteLLM, alongside reasoning_content
    reasoning_items: Any = None  # LiteLLM, alongside reasoning_content
    parsed: Any = None  # the openai SDK's chat.completions.parse, alongside content


class ChatMessage(MessageMetadata):
    """A message of a conversation. An earlier answer may have the fields that an SDK or a proxy adds when it serializes
    the answer.
    """

    role: NonEmpty
    content: OrList[Text, Annotated[list[TextPart], FAIL_FAST, SPENDS]] | None = None
    name: Text | None = None
    tool_calls: Objects | None = None
    tool_call_id: Text | None = None
    refusal: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    annotations: Objects | None = None
    audio: None = None
    function_call: None = None


Tools = tuple[Mapping[str, Any], ...]


def check_tools(field: str, value: Any) -> Tools:
    """Checks that the tools are functions with different names; an empty list counts as no tools."""
    validate(field, _TOOLS, value)
    names: set[str] = set()
    for position, tool in enumerate(value):
        name = tool["function"]["name"]
        place = f"{field}[{position}].function.name"
        if not NAME_CHARACTERS.issuperset(name):
            raise InvalidInput(place, f"must consist of letters, digits, '_', '-' and '.', got {shown(name)}")
        parameters = tool["function"].get("parameters") or {}
        if parameters.get("type", "object") != "object":
            where = f"{field}[{position}].function.parameters.type"
            raise InvalidInput(where, f"must be object, got {shown(parameters['type'])}")
        if name in names:
            raise InvalidInput(place, f"{name} is the name of an earlier function")
        names.add(name)
    return tuple(value)


def chosen_tools(tools: Tools | None, given: Merged, info: ModelInfo) -> tuple[Tools | None, ToolChoice]:
    """Returns the tools for the chat template, and which of them the answer may call.

    Raises InvalidInput.
    """
    choice = given["tool_choice"].value if "tool_choice" in given else "auto"
    if not tools or choice == "none":
        if choice not in ("auto", "none"):
            raise InvalidInput(given["tool_choice"].spelling, "needs tools")
        return None, ToolChoice()
    functions = [tool["function"] for tool in tools]
    name = _named(choice, functions, given)
    resolved = ToolChoice(
        required=choice == "required",
        name=name,
        parallel="parallel_tool_calls" not in given or bool(given["parallel_tool_calls"].value),
        strict=frozenset(function["name"] for function in functions if function.get("strict")),
    )
    if resolved.forced or resolved.strict:
        _check_calls_end(functions, name)
    if not resolved.forced and (info.tool_parser is None or "tools" not in info.template_arguments):
        what = "has no known notation for calls" if info.tool_parser is None else "does not read tools"
        instead = 'force a call (tool_choice: "required", or one function)'
        if info.tool_parser is None:
            instead += ", or name the notation of its calls in the model's setting tool_parser"
        raise InvalidInput("tools", f"the model's chat template {what}: {instead}")
    if info.tool_parser == _NO_PARSER and (resolved.forced or resolved.strict):
        field = given["tool_choice"].spelling if resolved.forced else "tools"
        raise InvalidInput(field, "cannot require a call while the model's setting tool_parser is none")
    return tools, resolved


def _check_calls_end(functions: Sequence[Mapping[str, Any]], only: str | None) -> None:
    for position, function in enumerate(functions):
        if only in (None, function["name"]):
            check_finite(f"tools[{position}].function.parameters", function.get("parameters") or {})


def parsed_calls(field: str, position: int, calls: Any) -> list[Any]:
    """Returns a message's calls with parsed arguments: in OpenAI's API the arguments are JSON text, but templates
    expect objects.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidInput(field, f"tool_calls of message {position} must be a list of objects, got {shown(calls)}")
    return [_parsed(field, f"call {number} of message {position}", call) for number, call in enumerate(calls)]


def _parsed(field: str, place: str, call: Mapping[str, Any]) -> Mapping[str, Any]:
    if call.get("type") not in (None, "function"):
        raise InvalidInput(field, f"{place} is of type {shown(call['type'])}; only functions are implemented")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = parsed_arguments(field, f"the arguments of {place} ", function["arguments"])
    return {**call, "function": {"name": function.get("name"), "arguments": arguments}}


def parsed_arguments(field: str, subject: str, text: str) -> dict[str, Any]:
    """Parses the arguments of a call. Raises InvalidInput, whose message begins with ``subject``."""
    try:
        arguments = parse_json(text or "{}")
    except ValueError as error:
        raise InvalidInput(field, f"{subject}must be JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidInput(field, f"{subject}must be a JSON object, got {shown(arguments)}")
    return arguments


def _named(choice: Any, functions: Sequence[Mapping[str, Any]], given: Merged) -> str | None:
    if not isinstance(choice, dict):
        return None
    if choice["name"] not in [function["name"] for function in functions]:
        raise InvalidInput(given["tool_choice"].spelling, f"no function of tools is named {shown(choice['name'])}")
    return str(choice["name"])


_MAX_TEMPLATE_ARGUMENTS = 64  # templates read a few; each is copied several times on its way there
# Arguments of apply_chat_template that the server sets itself. A client that set them could run its own template.
_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

_NO_NAME = "<|\\/>"  # as in OpenAI's API
_MARKS = re.compile(rf"[\s\x00-\x1f{re.escape(_NO_NAME)}]")
_REASONING = ("reasoning", "reasoning_content")  # templates read one or the other


def check_messages(field: str, value: Any, most: int) -> tuple[Mapping[str, Any], ...]:
    """Validates a list of messages, and joins the parts of each message's content into one string.

    The list must not be empty, and has at most ``most`` messages and parts. Raises InvalidInput.
    """
    if not isinstance(value, list) or not value:
        raise InvalidInput(field, f"must be a non-empty list of messages, got {shown(value)}")
    budget = ElementBudget(most)
    budget.take(field, len(value))
    return tuple(_check_message(field, position, message, budget) for position, message in enumerate(value))


def check_template_arguments(field: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``value``. Raises InvalidInput if it has too many entries, or an argument that only the server may
    set."""
    if len(value) > _MAX_TEMPLATE_ARGUMENTS:
        raise InvalidInput(field, f"may have at most {_MAX_TEMPLATE_ARGUMENTS} entries, got {len(value)}")
    reserved = sorted(_RESERVED_TEMPLATE_ARGUMENTS.intersection(value))
    if reserved:
        raise InvalidInput(field, f"may not set {', '.join(reserved)}")
    return value


def _check_message(field: str, position: int, message: Any, budget: ElementBudget) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise InvalidInput(field, f"message {position} must be an object, got {shown(message)}")
    role = message.get("role")
    if not is_text(role) or not role:
        raise InvalidInput(field, f"message {position} needs a role, got {shown(role)}")
    _check_names(field, position, role, message.get("name"))
    # Nulls are dropped, because templates test whether a key is present.
    checked = {key: part for key, part in message.items() if part is not None and key not in fields(MessageMetadata)}
    calls = message.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = parsed_calls(field, position, calls)
    for key in _REASONING:
        if key in checked:
            if not is_text(checked[key]):
                raise InvalidInput(field, f"{key} of message {position} must be text, got {shown(checked[key])}")
            checked = {**dict.fromkeys(_REASONING, checked[key]), **checked}
    if message.get("content") is None and role != "assistant":
        raise InvalidInput(field, f"message {position} needs content")
    checked["content"] = _content(field, position, message.get("content"), budget)
    return checked


def _check_names(field: str, position: int, role: str, name: Any) -> None:
    """Raises InvalidInput unless the role and the name are safe to put into a prompt.

    Templates insert both without escaping, so neither may contain a template's marks or a line break.
    """
    if len(role) > MAX_NAME or not NAME_CHARACTERS.issuperset(role):
        may = f"must consist of up to {MAX_NAME} letters, digits, '_', '-' and '.'"
        raise InvalidInput(field, f"the role of message {position} {may}, got {shown(role)}")
    if name is not None and (not is_text(name) or _MARKS.search(name)):
        raise InvalidInput(field, f"the name of message {position} must not contain white space or any of {_NO_NAME}")


def _content(field: str, position: int, content: Any, budget: ElementBudget) -> str:
    parts = content if isinstance(content, list) else ["" if content is None else content]
    budget.take(field, len(parts))
    return "".join(_part(field, position, part) for part in parts)


def _part(field: str, position: int, part: Any) -> str:
    if isinstance(part, dict):
        kind = part.get("type")
        if kind != "text":
            raise InvalidInput(field, f"message {position} has a part of type {shown(kind)}; only text is implemented")
        part = part.get("text")
    if not is_text(part):
        raise InvalidInput(field, f"content of message {position} must be text, got {shown(part)}")
    return str(part)
