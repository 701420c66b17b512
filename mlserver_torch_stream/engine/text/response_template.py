"""Divides answers as a tokenizer's ``response_template`` declares. XML calls are read with such a template, too.

Regions that are neither reasoning nor calls, and text between regions, belong to the answer's text, so no text is lost.
Values in XML calls are converted to the types in the functions' schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from mlserver_torch_stream.engine.text.answer_format import Part, Reasoning, joined
from mlserver_torch_stream.engine.text.region_calls import RegionCalls, spelling_of
from mlserver_torch_stream.types import ReasoningMarks

_REASONING, _CONTENT, _CALLS = "reasoning", "content", "tool_calls"
_MEANINGS = {"thinking": _REASONING, _REASONING: _REASONING, "reasoning_content": _REASONING, _CALLS: _CALLS}
_BETWEEN = "text between regions"


class AnswerTemplate:
    """A ``response_template``. Raises ValueError if transformers cannot read it."""

    def __init__(self, declared: Mapping[str, Any]) -> None:
        load_response_template(dict(declared))  # its errors name only the declared fields
        self.fields: Mapping[str, Mapping[str, Any]] = declared["fields"]
        self.spec = load_response_template(_with_text_between(declared))
        self.calls = spelling_of(declared)
        self.meanings = {name: _MEANINGS.get(name, name) for name in self.fields}
        self.meanings[str(self.spec.implicit)] = self.meanings.get(str(self.spec.implicit), _CONTENT)
        self._written = json.dumps(declared, ensure_ascii=False).replace("\\", "")

    @property
    def reasons(self) -> bool:
        return _REASONING in self.meanings.values()

    @property
    def reasoning_marks(self) -> ReasoningMarks | None:
        """The marks of the reasoning; None if a mark is a list or a pattern, or if the answer's text also has marks."""
        regions = {self.meanings[name]: region for name, region in self.fields.items()}
        region = regions.get(_REASONING, {})
        begin, end = region.get("open"), region.get("close")
        implied = _CONTENT not in regions or self.spec.implicit in self.fields
        if not implied or not isinstance(begin, str) or not isinstance(end, str):
            return None
        return ReasoningMarks(end, begin)

    def marks(self, tokens: Mapping[str, int]) -> frozenset[int]:
        """Returns the ids of those ``tokens`` that occur in the template."""
        return frozenset(token_id for token, token_id in tokens.items() if token in self._written)


class TemplateParser:
    """Parses the text of one answer. ``prefix`` is the beginning of the answer that the prompt already has.

    ``tools`` are the functions that may be called; None means that calls are returned as text. Without ``reasoning``
    the reasoning is also returned as text.
    """

    def __init__(
        self,
        template: AnswerTemplate,
        prefix: str,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        parallel: bool = True,
        reasoning: bool = True,
    ) -> None:
        calls = None if tools is None or template.calls is None else template.calls
        self._template = template
        self._calls = None if calls is None else RegionCalls(calls, tools or (), parallel=parallel)
        self._divided = {_CONTENT, *([_REASONING] if reasoning else ()), *([] if calls is None else [_CALLS])}
        self._parts: list[Part] = []
        self._space = ""  # whitespace that is released if more text follows in its region
        self._any = False  # text in the region that is not whitespace
        self._regions = _RegionReader(template.spec, prefix, self)
        self._parts, self._space = [], ""

    @property
    def called(self) -> int:
        return 0 if self._calls is None else self._calls.called

    @property
    def broken(self) -> bool:
        return self._calls is not None and self._calls.broken

    @property
    def ended(self) -> bool:
        return self._calls is not None and self._calls.ended

    @property
    def reasons(self) -> bool:
        return self._meaning(self._regions.field) == _REASONING

    def push(self, text: str) -> list[Part]:
        self._regions.push(text)
        return self._take()

    def flush(self) -> list[Part]:
        self._regions.flush()
        return self._take()

    def opened(self, field: str, raw: str, captures: Mapping[str, str]) -> None:
        """Called when a region begins with the text ``raw``; ``captures`` has the named groups of the pattern."""
        self._space, self._any = "", False
        meaning = self._meaning(field)
        if meaning == _CALLS and self._calls is not None:
            self._calls.open(raw, captures)
        elif meaning is None:
            self._add(raw)

    def said(self, field: str, text: str) -> None:
        """Called with the next text of a region, without its marks."""
        meaning = self._meaning(field)
        if meaning == _CALLS and self._calls is not None:
            self._add(*self._calls.push(text))
        elif meaning is None:
            self._add(text)
        elif text := self._stripped(field, text):
            self._add(Reasoning(text) if meaning == _REASONING else text)

    def closed(self, field: str, raw: str) -> None:
        """Called when a region ends.

        ``raw`` is its closing text, which is empty if the answer ends within the region.
        """
        meaning = self._meaning(field)
        if meaning == _CALLS and self._calls is not None:
            self._add(*self._calls.close(raw))
        elif meaning is None:
            self._add(raw)
        self._space, self._any = "", False

    def _meaning(self, field: str) -> str | None:
        """Returns the meaning of a field; None if its text and its marks belong to the answer's text."""
        meaning = self._template.meanings.get(field)
        return meaning if meaning in self._divided else None

    def _stripped(self, field: str, text: str) -> str:
        """Returns the text without the region's leading and trailing whitespace; transformers strips it, too."""
        if not self._template.spec.fields[field].content_args.get("strip", True):
            return text
        text = self._space + text if self._any else text.lstrip()
        kept = text.rstrip()
        self._space, self._any = text[len(kept) :], self._any or bool(kept)
        return kept

    def _add(self, *parts: Part) -> None:
        self._parts += parts

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return joined(parts)


class _RegionReader(ResponseParser):  # type: ignore[misc]  # transformers has no types
    """Reports regions to a parser while their text arrives; transformers' own parser returns a region only as a whole.

    The text is read character by character, because otherwise the results of some patterns would depend on how the text
    is cut.
    """

    def __init__(self, template: ResponseTemplate, prefix: str, parser: TemplateParser) -> None:
        self._parser = parser
        self._told = 0  # characters that were reported to the parser
        super().__init__(template, prefix)

    @property
    def field(self) -> str:
        """The region to which the next text belongs."""
        return str(self._current)

    def push(self, text: str) -> None:
        for char in text:
            self.feed(char)

    def flush(self) -> None:
        """Ends the answer, and reports text that was held back."""
        self._process([], eos=True)

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        self._opened = True
        self._told = self._pos + len(text)
        self._parser.said(self.field, text)

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._told = self._pos
        self._parser.opened(field.name, m.group(), self._captures)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        if self._current != self._implicit_name:
            self._parser.closed(self.field, self._buffer[self._told : self._pos])
        self._reset_to_implicit()


def _with_text_between(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template with a field for the text between regions; adds such a field if the template has none.

    The start of a message does not belong to the text between regions.
    """
    fields = dict(declared["fields"])
    if all("open" in region or "open_pattern" in region for region in fields.values()):
        kind = "" if "start_anchor" in declared else "_pattern"
        fields[_BETWEEN] = {f"close{kind}": declared[f"start_anchor{kind}"]}
    return {**declared, "fields": fields}


QWEN3_CODER_PARSER, GLM_PARSER = "qwen3_coder", "glm45"
_PATTERNS = {
    QWEN3_CODER_PARSER: (
        r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
        r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    GLM_PARSER: (
        r"<tool_call>\s*(?P<name>[^\s<]+)",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
}
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@cache
def xml_calls(parser: str) -> AnswerTemplate:
    """Returns the template for answers whose tool calls are the XML-like tags of the format ``parser``."""
    begin, tags = _PATTERNS[parser]
    calls: Mapping[str, Any] = {
        "open_pattern": begin,
        "close": "</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tags},
        "transform": _CALL,
    }
    return AnswerTemplate({"start_anchor": "<tool_response>", "fields": {"tool_calls": calls, "content": {}}})
