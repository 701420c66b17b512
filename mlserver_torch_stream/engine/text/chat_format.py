"""Finds out how a model writes reasoning and tool calls, and writes grammars for required calls.

The grammar is written in llguidance's variant of Lark.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.engine.text.answer_format import BEGIN, END, AnswerFormat, CallParser, ReasoningParser
from mlserver_torch_stream.engine.text.response_template import (
    GLM_PARSER,
    QWEN3_CODER_PARSER,
    AnswerTemplate,
    TemplateParser,
    xml_calls,
)
from mlserver_torch_stream.engine.text.tool_parsers import (
    ARGUMENTS_MARK,
    ID_MARK,
    HermesCalls,
    LlamaCalls,
    MarkedCalls,
    MistralCalls,
)
from mlserver_torch_stream.errors import InvalidInput, SettingsError
from mlserver_torch_stream.tool_calls import ToolChoice
from mlserver_torch_stream.types import ChatPrompt, Constraint, ConstraintKind, ReasoningMarks

# JSON as models write it: if whitespace were free, a model could write whitespace without end.
_JSON = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ANY: Mapping[str, Any] = {"type": "object"}
_NO_GBNF = "\\u003a:="  # llguidance would take a text with "::=" for a grammar of llama.cpp
_TEXT = "TEXT: /(?s:.*)/\n"


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a call is written: ``begin``, with the function's name in place of ``NAME``, the arguments, and ``end``.

    ``mark`` precedes a call or a list of calls. A list begins with ``open``, has ``between`` between the calls, and
    ends with ``close``. If the mark is ``optional``, a call without a mark can be the whole answer. ``several`` means
    that an answer can have several calls.
    """

    mark: str
    begin: str
    end: str = ""
    open: str = ""
    between: str | None = None  # None means that a second call begins as the first does
    close: str = ""
    optional: bool = False
    several: bool = True


NAME = "NAME"
HERMES = CallSpelling("<tool_call>", '\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
LLAMA = CallSpelling("<|python_tag|>", '{"name": "NAME", "parameters": ', "}", optional=True, several=False)
MISTRAL_LIST = CallSpelling("[TOOL_CALLS]", '{"name": "NAME", "arguments": ', "}", " [", ", ", "]")
MISTRAL_NAMED = CallSpelling("[TOOL_CALLS]", "NAME[ARGS]")


def tool_grammar(
    spelling: CallSpelling,
    functions: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    tokens: Mapping[str, int],
    answer: str | None = None,
) -> str | None:
    """Returns the grammar of answers with calls; None if any answer is allowed.

    ``tokens`` maps marks that are single tokens to their ids.

    An answer without calls must match the Lark rule ``answer``; None means that it can be any text.
    """
    strict = any(function["name"] in choice.strict for function in functions)
    if not choice.forced and not strict and answer is None:
        return None
    if choice.name is not None:
        functions = [function for function in functions if function["name"] == choice.name]
    calls = _calls(spelling, tokens, one=not choice.parallel or choice.name is not None)
    rules = [
        f"call_{number}: {_bodies(spelling, tokens, function, strict=function['name'] in choice.strict)}"
        for number, function in enumerate(functions)
    ]
    every = " | ".join(f"call_{number}" for number in range(len(functions)))
    grammar = "\n".join([f"call: {every}", *rules, ""])
    if choice.forced:
        return f"start: {calls}\n{grammar}"
    if answer is not None:
        return f"start: {calls} | answer\nanswer: {answer}\n{grammar}"
    return f"{_free(spelling, tokens, calls)}{grammar}"


def json_answer(constraint: Constraint) -> str:
    """Returns the JSON constraint as a Lark rule. Raises InvalidInput for a constraint of another kind."""
    if constraint.kind not in (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT):
        raise InvalidInput(constraint.field, "only JSON is implemented if the request has tools")
    schema = json.loads(constraint.source) if constraint.kind is ConstraintKind.JSON_SCHEMA else _ANY
    return _json(schema if isinstance(schema, dict) else {"allOf": [schema]}, lenient=False)


def _json(schema: Mapping[str, Any], *, lenient: bool) -> str:
    text = json.dumps({**schema, "x-guidance": {**_JSON, "lenient": lenient}})
    return f"%json {text.replace('::=', _NO_GBNF)}"


def _calls(spelling: CallSpelling, tokens: Mapping[str, int], *, one: bool) -> str:
    mark = "" if spelling.optional else _marked(spelling.mark, tokens)
    first = f"{mark} {_literal(spelling.open, tokens)} call"
    if one or not spelling.several:
        return f"{first} {_literal(spelling.close, tokens)}"
    if spelling.between is not None:
        return f"{first} ({_literal(spelling.between, tokens)} call)* {_literal(spelling.close, tokens)}"
    return f'{first} ("\\n"? {first})*'


def _bodies(spelling: CallSpelling, tokens: Mapping[str, int], function: Mapping[str, Any], *, strict: bool) -> str:
    arguments = _json({**_ANY, **(function.get("parameters") or {})}, lenient=not strict)
    begin = _literal(spelling.begin.replace(NAME, function["name"]), tokens)
    return f"{begin} {arguments} {_literal(spelling.end, tokens)}"


def _free(spelling: CallSpelling, tokens: Mapping[str, int], calls: str) -> str:
    """Returns the rules for a text that may contain anything, but in which every mark must be followed by a call."""
    if spelling.optional:
        return f"start: {calls} | OTHER?\nOTHER: /[^\\s{{](?s:.*)/ & ~/(?s:.*){re.escape(spelling.mark)}(?s:.*)/\n"
    after_mark = calls.removeprefix(_marked(spelling.mark, tokens))
    if spelling.mark in tokens:
        return f"start: (TEXT {_marked(spelling.mark, tokens)} {after_mark})* TEXT\n{_TEXT}"
    begin = json.dumps(spelling.mark)
    text = f"TEXT: /(?s:.*)/ & ~/(?s:.*){re.escape(spelling.mark)}(?s:.*)/\n"
    return f"start: (begin {after_mark})* TEXT\nbegin[suffix={begin}]: /(?s:.*)/\n{text}"


def _marked(mark: str, tokens: Mapping[str, int]) -> str:
    return f"<[{tokens[mark]}]>" if mark in tokens else json.dumps(mark)


def _literal(text: str, tokens: Mapping[str, int]) -> str:
    """Returns a text in the notation of the grammar, where marks that are single tokens are written as tokens."""
    marks = "|".join(map(re.escape, tokens))
    parts = re.split(f"({marks})", text) if marks else [text]
    return " ".join(_marked(part, tokens) for part in parts if part)


logger = logging.getLogger(__name__)

AUTO, NONE, TEMPLATE = "auto", "none", "template"
HERMES_PARSER, LLAMA_PARSER, MISTRAL_PARSER = "hermes", "llama3", "mistral"
_CALL_MARKS = (HermesCalls.mark, HermesCalls.end, LlamaCalls.mark, MistralCalls.mark, ARGUMENTS_MARK, ID_MARK)
_REASONING_MARKS = (BEGIN, END)
_ARGUMENTS = ("tools", "reasoning_effort", "enable_thinking")


class CallNotation(Protocol):
    """One way to write tool calls."""

    def is_in(self, template: str) -> bool:
        """Returns whether a chat template writes calls in this format."""

    def parser(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> CallParser:
        """Returns a parser that finds the calls in an answer."""

    def spelling(self, template: str) -> CallSpelling | None:
        """Returns the format in which a model with this chat template writes calls, for making a grammar; None if no
        grammar can be made."""


@dataclass(frozen=True, slots=True)
class MarkedNotation:
    """JSON calls after a mark. Templates with ``[ARGS]`` use ``named`` if it is set; all others use ``plain``."""

    calls: type[MarkedCalls]
    plain: CallSpelling
    named: CallSpelling | None = None

    def is_in(self, template: str) -> bool:
        return self.calls.mark in template

    def parser(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> CallParser:
        return self.calls(frozenset(str(tool["function"]["name"]) for tool in tools), parallel=parallel)

    def spelling(self, template: str) -> CallSpelling | None:
        return self.named if self.named is not None and ARGUMENTS_MARK in template else self.plain


@dataclass(frozen=True, slots=True)
class XmlNotation:
    """XML calls after Hermes' mark. Chat templates that write such calls contain the text ``tag``."""

    name: str
    tag: str

    def is_in(self, template: str) -> bool:
        return HermesCalls.mark in template and self.tag in template

    def parser(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> CallParser:
        return TemplateParser(xml_calls(self.name), "", tools, parallel=parallel)

    def spelling(self, template: str) -> CallSpelling | None:
        return None


# By the setting's value. The first one that a chat template shows is the model's.
NOTATIONS: Mapping[str, CallNotation] = {
    QWEN3_CODER_PARSER: XmlNotation(QWEN3_CODER_PARSER, "<function="),
    GLM_PARSER: XmlNotation(GLM_PARSER, "<arg_key>"),
    HERMES_PARSER: MarkedNotation(HermesCalls, HERMES),
    MISTRAL_PARSER: MarkedNotation(MistralCalls, MISTRAL_LIST, MISTRAL_NAMED),
    LLAMA_PARSER: MarkedNotation(LlamaCalls, LLAMA),
}


class ChatFormat:
    """How a model writes reasoning and tool calls; the chat template and the settings determine this.

    ``tool_parser`` and ``reasoning_parser`` are the settings' values.

    ``tools`` names the parser of calls; None if no parser matches the template. A call can still be forced then, in the
    format of Hermes models. The same format is used for a model if no grammar of its own calls can be made here.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tool_parser: str = AUTO, reasoning_parser: str = AUTO):
        """Raises SettingsError if the settings name the tokenizer's ``response_template`` but there is none."""
        text = _template_text(tokenizer.chat_template)
        shown = next((name for name, notation in NOTATIONS.items() if notation.is_in(text)), None)
        self._template = _declared(tokenizer, tool_parser, shown)
        if tool_parser != AUTO:
            self.tools: str | None = tool_parser
        else:
            self.tools = shown if self._template is None or self._template.calls is None else TEMPLATE
        thinks = END in text if self._template is None else self._template.reasons
        self.reasons = thinks if reasoning_parser == AUTO else reasoning_parser != NONE
        self.arguments = frozenset(name for name in _ARGUMENTS if name in text)
        notation = NOTATIONS.get((shown if self.tools == TEMPLATE else self.tools) or NONE)
        self._spelling = None if notation is None else notation.spelling(text)
        added = tokenizer.added_tokens_decoder
        self._added = {str(token.content): token_id for token_id, token in added.items()}
        self._call_marks = {mark: self._added[mark] for mark in _CALL_MARKS if mark in self._added}
        self._reasoning_marks = {mark: self._added[mark] for mark in _REASONING_MARKS if mark in self._added}

    def answer(self, prompt: ChatPrompt, ending: str, constraint: Constraint | None = None) -> AnswerFormat:
        """Returns how the answer to a conversation is divided.

        ``ending`` is the last part of the rendered conversation. The answer's text must match ``constraint``.
        """
        if prompt.continues:
            ending = str(prompt.messages[-1]["content"])
        kind = self._kind(prompt)
        whole = constraint if prompt.tools is None or kind == NONE else self._constraint(prompt, constraint)
        if self._template is not None and kind == TEMPLATE:
            return self._declared_answer(self._template, prompt, ending, whole)
        calls = None if prompt.tools is None else self._calls(prompt, kind)
        reasoning = self._reasoning(ending)
        marks = {
            *({} if reasoning is None else self._reasoning_marks).values(),
            *({} if calls is None else self._call_marks).values(),
        }
        begin = None if _begun(ending) else BEGIN
        return AnswerFormat(
            reasoning, calls, frozenset(marks), whole, None if reasoning is None else ReasoningMarks(END, begin)
        )

    def _declared_answer(
        self, template: AnswerTemplate, prompt: ChatPrompt, ending: str, constraint: Constraint | None
    ) -> AnswerFormat:
        parallel = prompt.tool_choice.parallel
        new = partial(TemplateParser, template, ending, prompt.tools, parallel=parallel, reasoning=self.reasons)
        marks = template.reasoning_marks if self.reasons else None
        if marks is not None and ending.rstrip().endswith(marks.end):
            marks = None
        elif marks is not None and new().reasons:
            marks = ReasoningMarks(marks.end)
        return AnswerFormat(None, new, template.marks(self._added), constraint, marks)

    def _reasoning(self, ending: str) -> Callable[[], ReasoningParser] | None:
        if not self.reasons or self._template is not None or ending.rstrip().endswith(END):
            return None
        return partial(ReasoningParser, begun=_begun(ending))

    def _calls(self, prompt: ChatPrompt, kind: str) -> Callable[[], CallParser] | None:
        if kind == NONE:
            return None
        return partial(NOTATIONS[kind].parser, prompt.tools or (), prompt.tool_choice.parallel)

    def _constraint(self, prompt: ChatPrompt, text: Constraint | None) -> Constraint | None:
        choice = prompt.tool_choice
        if self._spelling is None and not choice.forced:
            if choice.strict:
                raise InvalidInput(
                    "tools", "strict functions are implemented for this model only if tool_choice forces a call"
                )
            if text is not None:
                raise InvalidInput(text.field, "is not implemented for this model if the request has tools")
        answer = None if text is None or choice.forced else json_answer(text)
        grammar = tool_grammar(self._spelling or HERMES, _functions(prompt), choice, self._call_marks, answer)
        return None if grammar is None else Constraint(ConstraintKind.GRAMMAR, grammar, "tools")

    def _kind(self, prompt: ChatPrompt) -> str:
        if prompt.tool_choice.forced and self._spelling is None and self.tools != NONE:
            return HERMES_PARSER
        return self.tools or (NONE if self._template is None else TEMPLATE)


def _begun(ending: str) -> bool:
    return ending.rfind(BEGIN) > ending.rfind(END)


def _declared(tokenizer: PreTrainedTokenizerBase, tool_parser: str, shown: str | None) -> AnswerTemplate | None:
    """Returns the tokenizer's ``response_template``; None if there is none or the setting names another parser.

    Also returns None if the ``response_template`` declares no calls but the chat template contains some. Raises
    SettingsError if the setting names the ``response_template`` but the template cannot be read.
    """
    declared = getattr(tokenizer, "response_template", None)
    if tool_parser not in (AUTO, TEMPLATE) or (declared is None and tool_parser == AUTO):
        return None
    try:
        if declared is None:
            raise ValueError("the tokenizer has none")
        template = AnswerTemplate(declared)
    except (ValueError, TypeError, KeyError) as error:
        if tool_parser == TEMPLATE:
            raise SettingsError(f"tool_parser: no usable response_template: {error}") from error
        logger.warning("the tokenizer's response_template is not used: %s", error)
        return None
    return None if template.calls is None and shown is not None and tool_parser == AUTO else template


def _functions(prompt: ChatPrompt) -> Sequence[Mapping[str, Any]]:
    return [tool["function"] for tool in prompt.tools or ()]


def _template_text(template: Any) -> str:
    """Returns the text of a chat template, or the texts of several templates in a dict."""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")
