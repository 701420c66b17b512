"""Checks a conversation: OpenAI-shaped messages whose parts become plain text, and template arguments.

Knows nothing of where the messages come from, nor of any chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.json_schema import ElementBudget
from mlserver_torch_stream.protocol.tools import MAX_NAME, NAME_CHARACTERS, parsed_calls
from mlserver_torch_stream.protocol.values import is_text, shown

# Arguments of apply_chat_template that are the server's: a client that set them could run its own template.
_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

# What proxies and their SDKs add to a message, and send back with it. No chat template sees it.
MESSAGE_METADATA = ("provider_specific_fields", "cache_control", "id", "reasoning_details")
_NO_NAME = "<|\\/>"  # as in OpenAI's API
_MARKS = re.compile(rf"[\s\x00-\x1f{re.escape(_NO_NAME)}]")
_REASONING = ("reasoning", "reasoning_content")  # templates read one or the other


def check_messages(field: str, value: Any, most: int) -> tuple[Mapping[str, Any], ...]:
    """A non-empty list of messages, each with a role and content that is one string; at most ``most`` messages and
    parts."""
    if not isinstance(value, list) or not value:
        raise InvalidInput(field, f"must be a non-empty list of messages, got {shown(value)}")
    budget = ElementBudget(most)
    budget.take(field, len(value))
    return tuple(_check_message(field, position, message, budget) for position, message in enumerate(value))


def check_template_arguments(field: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
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
    # Templates ask whether a key is there.
    checked = {key: part for key, part in message.items() if part is not None and key not in MESSAGE_METADATA}
    calls = message.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = parsed_calls(field, position, calls)
    for key in _REASONING:
        if key in checked:
            if not is_text(checked[key]):
                raise InvalidInput(field, f"{key} of message {position} must be text, got {shown(checked[key])}")
            checked = {**dict.fromkeys(_REASONING, checked[key]), **checked}
    if message.get("content") is None and not calls:
        raise InvalidInput(field, f"message {position} needs content")
    checked["content"] = _content(field, position, message.get("content"), budget)
    return checked


def _check_names(field: str, position: int, role: str, name: Any) -> None:
    """Raises InvalidInput. Templates write both of them as they are, where a filter of contents does not look: no mark
    of a template and no new line can be in them."""
    if len(role) > MAX_NAME or not NAME_CHARACTERS.issuperset(role):
        may = f"may have up to {MAX_NAME} letters, digits, '_', '-' and '.'"
        raise InvalidInput(field, f"the role of message {position} {may}, got {shown(role)}")
    if name is not None and (not is_text(name) or _MARKS.search(name)):
        raise InvalidInput(field, f"the name of message {position} may have no space and none of {_NO_NAME}")


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
