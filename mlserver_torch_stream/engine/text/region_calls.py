"""Reads the tool calls in the regions of a ``response_template``.

JSON is read as it arrives, XML one argument at a time, and other formats when the region has ended. A region that is
not a call is returned as text, together with its marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import parse_response

from mlserver_torch_stream.engine.text.answer_format import Part
from mlserver_torch_stream.engine.text.call_reader import (
    FUNCTION_NAME,
    WHITESPACE,
    ArgumentsReader,
    CallKeys,
    ObjectReader,
)
from mlserver_torch_stream.engine.text.tool_parsers import MarkedCalls

_FIELD = "tool_calls"
_CAPTURED = re.compile(r"\{(\w+)\}")
_INSIDE = re.compile(r"\{content\.(\w+)\}")
_CONTENT = "{content}"
_TAG = re.compile(r"</?\w+>")
_LAST_TAG = re.compile(r"</\w+>\Z")
_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # raised if the text is not a call


@dataclass(frozen=True, slots=True)
class RegionSpelling:
    """How calls are written in a region.

    With ``keys``, each call is a JSON object that has these keys; ``listed`` means that the objects are in a list. With
    ``capture``, the region has only the arguments; the function's name is in the opening mark, in the regex group
    ``capture``. With neither ``keys`` nor ``capture``, transformers parses the whole region with ``template``. ``tags``
    matches one argument in XML, and ``closing`` is the text at the end of each argument.
    """

    template: Mapping[str, Any]
    capture: str | None = None
    keys: CallKeys | None = None
    listed: bool = False
    tags: re.Pattern[str] | None = field(default=None, compare=False)
    closing: str = ""

    def parse(self, raw: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Returns the name and arguments of each call in a whole region; no calls if the region also has other text."""
        if self.tags is not None and _TAG.sub("", self.tags.sub("", raw[_head(self, raw) :])).strip():
            return []
        try:
            message = parse_response(raw, dict(self.template), prefix="", tools=list(tools))
            calls = [_call(call) for call in message[_FIELD]]
        except _ERRORS:
            return []
        return calls if all(FUNCTION_NAME.fullmatch(name) for name, _ in calls) else []


def spelling_of(template: Mapping[str, Any]) -> RegionSpelling | None:
    """Returns how calls are written in a template; None if it has no calls."""
    if _FIELD not in template["fields"]:
        return None
    region = template["fields"][_FIELD]
    content, for_each = region.get("content", "text"), bool(region.get("transform_each"))
    if content == "xml-inline":
        pattern = region["content_args"]["tag_pattern"]
        closing = _LAST_TAG.search(pattern)
        return RegionSpelling(
            template, tags=re.compile(pattern, re.DOTALL), closing="" if closing is None else closing[0]
        )
    if content != "json" or region.get("content_args"):
        return RegionSpelling(template)
    function = (region.get("transform") or {}).get("function")
    if function == _CONTENT and not for_each:
        return RegionSpelling(template, keys=CallKeys())
    if not isinstance(function, dict) or function.keys() != {"name", "arguments"}:
        return RegionSpelling(template)
    name, arguments = str(function["name"]), str(function["arguments"])
    if arguments == _CONTENT and not for_each and (captured := _CAPTURED.fullmatch(name)):
        return RegionSpelling(template, capture=captured[1])
    pattern = _CAPTURED if for_each else _INSIDE
    if (name_key := pattern.fullmatch(name)) and (arguments_key := pattern.fullmatch(arguments)):
        return RegionSpelling(template, keys=CallKeys(name_key[1], (arguments_key[1],)), listed=for_each)
    return RegionSpelling(template)


class RegionCalls(MarkedCalls):
    """Finds the calls in an answer's regions.

    For each region, call ``open``, then ``push`` with the text, then ``close``.
    """

    def __init__(self, spelling: RegionSpelling, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> None:
        super().__init__((), parallel=parallel)
        self._spelling = spelling
        self._tools = tools
        self._captures: Mapping[str, str] = {}
        self._given = ""  # arguments so far of a call that is not complete

    def open(self, raw: str, captures: Mapping[str, str]) -> None:
        self._captures, self._listed, self._given = captures, False, ""
        self._raw, self._state = raw, self._opened

    def close(self, raw: str) -> list[Part]:
        """Ends the region; ``raw`` is its closing mark.

        An empty ``raw`` means that the answer has ended; a call that has begun is then cut off.
        """
        self._raw += raw
        if self._state == self._whole:
            self._parse(cut_off=not raw)
        elif self._state == self._in_text:
            self._say(raw)
        elif self._begun and not raw:
            self.broken = True
        elif self._state != self._after_call or self._listed:
            self._give_up(self._raw)
        self._begun, self._raw, self._state = False, "", self._in_text
        return self._take()

    def _in_text(self, char: str) -> bool:
        self._say(char)
        return True

    def _opened(self, char: str) -> bool:
        spelling = self._spelling
        if spelling.capture is None and spelling.keys is None:
            self._state = self._whole
            return True
        if char in WHITESPACE:
            return True
        if spelling.listed:
            self._listed, self._state = char == "[", self._next_call
            return self._listed
        return self._next_call(char)

    def _next_call(self, char: str) -> bool:
        if self._spelling.capture is None:
            return self._read(ObjectReader(keys=self._spelling.keys), char)
        name = self._captures.get(self._spelling.capture, "")
        return FUNCTION_NAME.fullmatch(name) is not None and self._read(ArgumentsReader(name), char)

    def _whole(self, char: str) -> bool:
        """The state in a region that is parsed when it ends. XML arguments are returned as soon as their tags end."""
        closing = self._spelling.closing
        if closing and self._raw.endswith(closing):
            calls = self._spelling.parse(self._raw, self._tools)
            if len(calls) == 1 and calls[0][1].startswith(self._given):
                name, arguments = calls[0]
                self._give_arguments(name, arguments.removesuffix("}"))
        return True

    def _parse(self, *, cut_off: bool) -> None:
        calls = self._spelling.parse(self._raw, self._tools)
        if not calls or not calls[0][1].startswith(self._given):
            if self._begun and cut_off:
                self.broken = True
            else:
                self._give_up(self._raw)
            return
        for name, arguments in calls if self._parallel else calls[:1]:
            self._give_arguments(name, arguments)
            self._given = ""
            self._complete()

    def _give_arguments(self, name: str, arguments: str) -> None:
        """Adds the part of ``arguments`` that has not been returned yet."""
        self._give(name, arguments.removeprefix(self._given))
        self._given = arguments


def _head(spelling: RegionSpelling, raw: str) -> int:
    """Returns the length of the mark that opens the region."""
    region = spelling.template["fields"][_FIELD]
    if "open_pattern" in region and (match := re.match(region["open_pattern"], raw, re.DOTALL)):
        return match.end()
    return 0


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call["function"]
    if not isinstance(function["name"], str) or not isinstance(function["arguments"], dict):
        raise TypeError("is not a call")
    return function["name"], json.dumps(function["arguments"], ensure_ascii=False)
