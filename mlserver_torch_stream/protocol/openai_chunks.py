"""Folds the chunks of a streamed OpenAI answer into the object that is answered without streaming.

Knows nothing of how they are transported. Unknown fields of a chunk are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WHOLE = {"chat.completion.chunk": "chat.completion"}
_SAID_ONCE = frozenset({"id", "type", "role", "name", "finish_reason", "object"})  # strings that never come in pieces


class ChunkFold:
    """The answer so far. Raises KeyError, TypeError or AttributeError at a chunk that is none."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Mapping[str, Any]) -> None:
        for key, value in chunk.items():
            if key != "choices" and (value is not None or key not in self._head):
                self._head[key] = value
        for choice in chunk["choices"]:
            _merge(self._choices.setdefault(choice["index"], {"index": choice["index"]}), choice)

    def whole(self) -> dict[str, Any]:
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
    """Elements with an ``index``, such as tool calls, are joined to the element with the same index."""
    for element in piece:
        index = element.get("index") if isinstance(element, dict) else None
        known = next((each for each in whole if index is not None and each.get("index") == index), None)
        if known is None:
            whole.append(_copy(element))
        else:
            _merge(known, element)


def _copy(value: Any) -> Any:
    """A value that later pieces may change."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list):
        merged: list[Any] = []
        _extend(merged, value)
        return merged
    return value
