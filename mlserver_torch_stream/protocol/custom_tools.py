"""Translates tools of OpenAI's Responses API that are not plain functions into functions, and their calls back.

A custom tool becomes a function with one string argument, ``input``. For a tool in a namespace, the function's name
includes the namespace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.lark_regex import regex_of_lark
from mlserver_torch_stream.protocol.values import ignores, printable

INPUT = "input"
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# The text of a JSON string up to an escape or a surrogate pair that is incomplete.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))*"
)


def function_name(name: str, namespace: str | None) -> str:
    """Returns the name of the function that stands for a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def without_hosted(body: Mapping[str, Any], known: Collection[str | None]) -> tuple[Mapping[str, Any], list[str]]:
    """Removes the tools whose types are not in ``known``, if the server ignores unknown parameters.

    Returns the body, and the names of the removed tools.
    """
    tools = body.get("tools")
    if not isinstance(tools, list):
        return body, []
    kept, left_out = [], []
    for position, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        name = printable(f"tools[{position}].type={kind}")
        if not isinstance(kind, str) or kind in known or not ignores(name):
            kept.append(tool)
        else:
            left_out.append(name)
    return ({**body, "tools": kept}, left_out) if left_out else (body, [])


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The name of the tool that a function stands for, as a call for the client contains it."""

    name: str
    namespace: str | None
    custom: bool


def named_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, NamedTool]:
    """Returns the tools that are not plain functions; each key is the name of the function that stands for the tool."""
    found = {}
    for tool, namespace in _flat(tools):
        named = NamedTool(tool["name"], namespace, tool["type"] == "custom")
        if named.custom or namespace is not None:
            found[function_name(named.name, namespace)] = named
    return found


def functions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools as functions of a chat. Raises InvalidInput."""
    return [_function(tool, namespace) for tool, namespace in _flat(tools)]


def _flat(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    for tool in tools:
        if tool["type"] == "namespace":
            yield from ((inner, tool["name"]) for inner in tool["tools"])
        else:
            yield tool, None


def _function(tool: Mapping[str, Any], namespace: str | None) -> dict[str, Any]:
    function = {key: value for key, value in tool.items() if key not in ("type", "format")}
    function["name"] = function_name(tool["name"], namespace)
    if tool["type"] == "custom":
        pattern = _pattern(function["name"], tool.get("format") or {})
        said = {"type": "string", **({} if pattern is None else {"pattern": f"^(?:{pattern})$"})}
        properties = {"properties": {INPUT: said}, "required": [INPUT], "additionalProperties": False}
        function |= {"parameters": {"type": "object", **properties}, "strict": pattern is not None}
    return {"type": "function", "function": function}


def _pattern(name: str, said: Mapping[str, Any]) -> str | None:
    if said.get("type") != "grammar":
        return None
    definition = str(said["definition"])
    if said["syntax"] == "regex":
        return definition
    try:
        return regex_of_lark(definition)
    except ValueError as error:
        raise InvalidInput("tools", f"the grammar of {name} {error}") from None


class ArgumentText:
    """Extracts the input text of a custom tool's call from the function's arguments, which arrive in pieces."""

    def __init__(self) -> None:
        self._arguments = ""  # the arguments before the text begins
        self._rest = ""  # an incomplete escape at the end of the text so far
        self._begun = False

    def push(self, piece: str) -> str:
        """Returns the part of the text that this piece completes."""
        if not self._begun:
            self._arguments += piece
            begin = _BEGIN.match(self._arguments)
            if begin is None:
                return ""
            self._begun, piece = True, self._arguments[begin.end() :]
        self._rest += piece
        match = _WHOLE.match(self._rest)
        whole = match[0] if match is not None else ""
        self._rest = self._rest[len(whole) :]
        text: str = json.loads(f'"{whole}"', strict=False)
        return text

    def flush(self) -> str:
        """Returns the unchanged arguments if they do not have the expected form; else an empty string."""
        return "" if self._begun else self._arguments
