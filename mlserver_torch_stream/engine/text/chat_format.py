"""Finds out how a model writes reasoning and tool calls: from the settings, from what its tokenizer declares, or from
its chat template's text.

Knows nothing of answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.engine.text.answer_format import AnswerFormat
from mlserver_torch_stream.engine.text.answer_parts import CallParser
from mlserver_torch_stream.engine.text.reasoning import BEGIN, END, ReasoningParser
from mlserver_torch_stream.engine.text.reasoning_marks import ReasoningMarks
from mlserver_torch_stream.engine.text.response_template import AnswerTemplate, TemplateParser
from mlserver_torch_stream.engine.text.tool_grammar import (
    HERMES,
    LLAMA,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    CallSpelling,
    json_answer,
    tool_grammar,
)
from mlserver_torch_stream.engine.text.tool_parsers import (
    ARGUMENTS_MARK,
    ID_MARK,
    HermesCalls,
    LlamaCalls,
    MarkedCalls,
    MistralCalls,
)
from mlserver_torch_stream.engine.text.xml_calls import GLM_PARSER, QWEN3_CODER_PARSER, xml_calls
from mlserver_torch_stream.errors import InvalidInput, SettingsError
from mlserver_torch_stream.types import ChatPrompt, Constraint, ConstraintKind

logger = logging.getLogger(__name__)

AUTO, NONE, TEMPLATE = "auto", "none", "template"
HERMES_PARSER, LLAMA_PARSER, MISTRAL_PARSER = "hermes", "llama3", "mistral"
_PARSERS: Mapping[str, type[MarkedCalls]] = {
    HERMES_PARSER: HermesCalls,
    LLAMA_PARSER: LlamaCalls,
    MISTRAL_PARSER: MistralCalls,
}
_CALL_MARKS = (HermesCalls.mark, HermesCalls.end, LlamaCalls.mark, MistralCalls.mark, ARGUMENTS_MARK, ID_MARK)
_REASONING_MARKS = (BEGIN, END)
# Texts in a chat template that has the mark of Hermes and writes calls in XML, each with the parser of such calls.
_XML = {"<function=": QWEN3_CODER_PARSER, "<arg_key>": GLM_PARSER}
_ARGUMENTS = ("tools", "reasoning_effort", "enable_thinking")


class ChatFormat:
    """``tool_parser`` and ``reasoning_parser`` are the settings' values.

    ``tools`` is the parser of calls; None if the template shows no calls that a parser knows. Then a call can still be
    forced, as Hermes writes it; so can a call of a model whose own way to write calls has no grammar here.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tool_parser: str = AUTO, reasoning_parser: str = AUTO):
        """Raises SettingsError if the parser is the tokenizer's ``response_template`` and it has none."""
        text = _template_text(tokenizer.chat_template)
        shown = _tools_of(text)
        self._template = _declared(tokenizer, tool_parser, shown)
        if tool_parser != AUTO:
            self.tools: str | None = tool_parser
        else:
            self.tools = shown if self._template is None or self._template.calls is None else TEMPLATE
        thinks = END in text if self._template is None else self._template.reasons
        self.reasons = thinks if reasoning_parser == AUTO else reasoning_parser != NONE
        self.arguments = frozenset(name for name in _ARGUMENTS if name in text)
        self._spelling = _spelling(shown if self.tools == TEMPLATE else self.tools, text)
        added = tokenizer.added_tokens_decoder
        self._added = {str(token.content): token_id for token_id, token in added.items()}
        self._call_marks = {mark: self._added[mark] for mark in _CALL_MARKS if mark in self._added}
        self._reasoning_marks = {mark: self._added[mark] for mark in _REASONING_MARKS if mark in self._added}

    def answer(self, prompt: ChatPrompt, ending: str, constraint: Constraint | None = None) -> AnswerFormat:
        """Returns how the answer to a conversation is divided.

        ``ending`` is the end of the rendered text. The answer's text must match ``constraint``.
        """
        last = prompt.messages[-1]
        if last.get("role") == "assistant":  # which the answer continues
            ending = str(last["content"])
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
        parallel = prompt.tool_choice.parallel
        if kind in _XML.values():
            return partial(TemplateParser, xml_calls(kind), "", prompt.tools, parallel=parallel)
        names = frozenset(str(function["name"]) for function in _functions(prompt))
        return None if kind == NONE else partial(_PARSERS[kind], names, parallel=parallel)

    def _constraint(self, prompt: ChatPrompt, text: Constraint | None) -> Constraint | None:
        choice = prompt.tool_choice
        if self._spelling is None and not choice.forced:
            if choice.strict:
                raise InvalidInput("tools", "strict functions need a forced call with this model's way to write calls")
            if text is not None:
                raise InvalidInput(text.field, "beside tools is not implemented for this model's way to write calls")
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
    """Returns the tokenizer's ``response_template``; None if it has none or the setting names another parser.

    None too if it declares no calls and the chat template shows some. Raises SettingsError if the setting asks for it
    and it cannot be read.
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
            raise SettingsError(f"tool_parser: no response_template: {error}") from error
        logger.warning("the tokenizer's response_template is not used: %s", error)
        return None
    return None if template.calls is None and shown is not None and tool_parser == AUTO else template


def _spelling(kind: str | None, template: str) -> CallSpelling | None:
    """Returns how a grammar spells calls; None if no grammar is known."""
    if kind == MISTRAL_PARSER:
        return MISTRAL_NAMED if ARGUMENTS_MARK in template else MISTRAL_LIST
    return {HERMES_PARSER: HERMES, LLAMA_PARSER: LLAMA}.get(kind or NONE)


def _functions(prompt: ChatPrompt) -> Sequence[Mapping[str, Any]]:
    return [tool["function"] for tool in prompt.tools or ()]


def _template_text(template: Any) -> str:
    """Returns the text of a chat template, or of several, which have names."""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")


def _tools_of(template: str) -> str | None:
    if HermesCalls.mark in template:
        return next((parser for mark, parser in _XML.items() if mark in template), HERMES_PARSER)
    if MistralCalls.mark in template:
        return MISTRAL_PARSER
    return LLAMA_PARSER if LlamaCalls.mark in template else None
