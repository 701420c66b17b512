"""Finds out how a model writes reasoning and tool calls: from the settings, or from its chat template's text.

Knows nothing of what is done with what an answer says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.engine.text.answer_format import AnswerFormat
from mlserver_torch_stream.engine.text.answer_parts import CallParser
from mlserver_torch_stream.engine.text.reasoning import BEGIN, END, ReasoningParser
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
from mlserver_torch_stream.tool_calls import ToolChoice
from mlserver_torch_stream.types import ChatPrompt, Constraint, ConstraintKind

AUTO, NONE = "auto", "none"
HERMES_PARSER, LLAMA_PARSER, MISTRAL_PARSER = "hermes", "llama3", "mistral"
_PARSERS: Mapping[str, type[MarkedCalls]] = {
    HERMES_PARSER: HermesCalls,
    LLAMA_PARSER: LlamaCalls,
    MISTRAL_PARSER: MistralCalls,
}
_CALL_MARKS = (HermesCalls.mark, HermesCalls.end, LlamaCalls.mark, MistralCalls.mark, ARGUMENTS_MARK, ID_MARK)
_REASONING_MARKS = (BEGIN, END)
# Templates with the mark of Hermes in which a call is no JSON: Qwen3-Coder's and GLM's.
_OTHER_CALLS = ("<function=", "<arg_key>")
_ARGUMENTS = ("tools", "reasoning_effort", "enable_thinking")


class ChatFormat:
    """``tool_parser`` and ``reasoning_parser`` are the settings' values.

    ``tools`` is the parser of calls; None where the template shows no calls that are known here. Then a call can be
    forced nevertheless, as Hermes writes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tool_parser: str = AUTO, reasoning_parser: str = AUTO):
        template = _template_text(tokenizer.chat_template)
        self.tools = _tools_of(template) if tool_parser == AUTO else tool_parser
        self.reasons = END in template if reasoning_parser == AUTO else reasoning_parser != NONE
        self.arguments = frozenset(name for name in _ARGUMENTS if name in template)
        self._named = ARGUMENTS_MARK in template
        added = tokenizer.added_tokens_decoder
        ids = {str(token.content): token_id for token_id, token in added.items()}
        self._call_marks = {mark: ids[mark] for mark in _CALL_MARKS if mark in ids}
        self._reasoning_marks = {mark: ids[mark] for mark in _REASONING_MARKS if mark in ids}

    def answer(self, prompt: ChatPrompt, ending: str, constraint: Constraint | None = None) -> AnswerFormat:
        """How the answer to a conversation is divided. ``ending`` is the end of the rendered text, ``constraint`` what
        the answer's text must match."""
        calls = self._calls(prompt)
        reasoning = self._reasoning(prompt, ending)
        marks = {
            *({} if reasoning is None else self._reasoning_marks).values(),
            *({} if calls is None else self._call_marks).values(),
        }
        return AnswerFormat(
            reasoning,
            calls,
            frozenset(marks),
            constraint if calls is None else self._constraint(prompt, constraint),
            None if reasoning is None else END,
        )

    def _reasoning(self, prompt: ChatPrompt, ending: str) -> Callable[[], ReasoningParser] | None:
        last = prompt.messages[-1]
        if last.get("role") == "assistant":  # which the answer continues
            ending = str(last["content"])
        begun = ending.rfind(BEGIN) > ending.rfind(END)
        closed = ending.rstrip().endswith(END)
        return partial(ReasoningParser, begun=begun) if self.reasons and not closed else None

    def _calls(self, prompt: ChatPrompt) -> Callable[[], CallParser] | None:
        kind = self._kind(prompt.tool_choice)
        if prompt.tools is None or kind == NONE:
            return None
        names = frozenset(str(function["name"]) for function in _functions(prompt))
        return partial(_PARSERS[kind], names, parallel=prompt.tool_choice.parallel)

    def _constraint(self, prompt: ChatPrompt, text: Constraint | None) -> Constraint | None:
        spelling = self._spelling(self._kind(prompt.tool_choice))
        answer = None if text is None or prompt.tool_choice.forced else json_answer(text)
        grammar = tool_grammar(spelling, _functions(prompt), prompt.tool_choice, self._call_marks, answer)
        return None if grammar is None else Constraint(ConstraintKind.GRAMMAR, grammar, "tools")

    def _kind(self, choice: ToolChoice) -> str:
        return self.tools or (HERMES_PARSER if choice.forced else NONE)

    def _spelling(self, kind: str) -> CallSpelling:
        if kind == MISTRAL_PARSER:
            return MISTRAL_NAMED if self._named else MISTRAL_LIST
        return HERMES if kind == HERMES_PARSER else LLAMA


def _functions(prompt: ChatPrompt) -> Sequence[Mapping[str, Any]]:
    return [tool["function"] for tool in prompt.tools or ()]


def _template_text(template: Any) -> str:
    """A chat template is a text, or several by name."""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")


def _tools_of(template: str) -> str | None:
    if HermesCalls.mark in template and not any(other in template for other in _OTHER_CALLS):
        return HERMES_PARSER
    if MistralCalls.mark in template:
        return MISTRAL_PARSER
    return LLAMA_PARSER if LlamaCalls.mark in template else None
