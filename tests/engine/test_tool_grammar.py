"""The grammars of forced and strict calls compile, and accept exactly the calls that the model's parser reads."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, get_args

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.engine.text.chat_format import (
    AUTO,
    HERMES,
    NONE,
    NOTATIONS,
    TEMPLATE,
    ChatFormat,
    tool_grammar,
)
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.tool_calls import ToolCallDelta, ToolChoice
from mlserver_torch_stream.types import ChatPrompt, Constraint, ConstraintKind, ReasoningMarks
from tests.engine.tiny_tokenizers import byte_level

_MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"]
_LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string"}, "far": {"type": "boolean"}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "description": "a ::= b",
}
_GO = {"name": "go.to", "parameters": {"type": "object", "properties": {"x": {"enum": ["::="]}}, "required": ["x"]}}
_TEMPLATES = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral named": "[TOOL_CALLS] [ARGS]",
}
# Of each template: the calls of two functions, as its grammar has them.
_CALLS = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>',
    "llama3": '{"name": "NAME", "parameters": ARGS}',
    "mistral": '[TOOL_CALLS] [{"name": "NAME", "arguments": ARGS}]',
    "mistral named": "[TOOL_CALLS]NAME[ARGS]ARGS",
}
_GOOD = {"look": '{"at": "home", "far": true}', "go.to": '{"x": "::="}'}


@cache
def _tokenizer(special: bool | None) -> PreTrainedTokenizerBase:
    """With ``special``, the marks are special tokens; with None, they are no tokens at all."""
    tokenizer = byte_level()
    if special is None:
        return tokenizer
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in _MARKS])
    return tokenizer


def _format(kind: str, special: bool | None, tool_parser: str = AUTO) -> ChatFormat:
    tokenizer = _tokenizer(special)
    tokenizer.chat_template = _TEMPLATES[kind]
    return ChatFormat(tokenizer, tool_parser)


def _prompt(choice: ToolChoice) -> ChatPrompt:
    tools = tuple({"type": "function", "function": each} for each in (_LOOK, _GO))
    return ChatPrompt(({"role": "user", "content": "hi"},), tools, choice)


def _constraint(
    kind: str, special: bool | None, choice: ToolChoice, text: Constraint | None = None
) -> Constraint | None:
    return _format(kind, special).answer(_prompt(choice), "", text).constraint


def _written(kind: str, name: str, arguments: str) -> str:
    return (
        _CALLS[kind].replace("NAME", name, 1).replace("ARGS", arguments)
        if kind != "mistral named"
        else (f"[TOOL_CALLS]{name}[ARGS]{arguments}")
    )


def _takes(constraint: Constraint | None, special: bool | None, text: str) -> bool:
    """Returns whether the constraint accepts the whole text as an answer."""
    assert constraint is not None and (constraint.kind, constraint.field) == (ConstraintKind.GRAMMAR, "tools")
    tokenizer = _tokenizer(special)
    matcher: LLMatcher = TextCodec(tokenizer).submit(constraint).result().start.deep_copy()
    return all(matcher.consume_token(token_id) for token_id in tokenizer(text)["input_ids"]) and matcher.is_accepting()


_kinds = pytest.mark.parametrize("kind", _TEMPLATES)
_tokens = pytest.mark.parametrize("special", [True, False, None], ids=["special", "plain", "text"])


@pytest.mark.long
@_kinds
@_tokens
def test_a_forced_answer_is_one_that_the_parser_reads(kind: str, special: bool | None) -> None:
    forced = _constraint(kind, special, ToolChoice(required=True))
    for name, arguments in _GOOD.items():
        text = _written(kind, name, arguments)
        assert _takes(forced, special, text)
        parser = _format(kind, special).answer(_prompt(ToolChoice(required=True)), "").parser()
        parts = [*parser.push(text), *parser.flush()]
        assert all(isinstance(part, ToolCallDelta) for part in parts), parts
        assert parser.called
    for wrong in ("Hello", _written(kind, "look", "{}"), _written(kind, "other", "{}"), _written(kind, "go.to", "{}")):
        assert not _takes(forced, special, wrong)
    assert not _takes(forced, special, "")


@_kinds
@_tokens
def test_a_named_function_is_called_once(kind: str, special: bool | None) -> None:
    named = _constraint(kind, special, ToolChoice(name="look"))
    call = _written(kind, "look", _GOOD["look"])
    assert _takes(named, special, call)
    assert not _takes(named, special, _written(kind, "go.to", _GOOD["go.to"]))
    assert not _takes(named, special, f"{call}{call}")


@_kinds
@_tokens
def test_strict_functions_bind_their_calls_alone(kind: str, special: bool | None) -> None:
    strict = _constraint(kind, special, ToolChoice(strict=frozenset({"look"})))
    for name, arguments in _GOOD.items():
        assert _takes(strict, special, _written(kind, name, arguments))
    assert _takes(strict, special, "Hello, world.") and _takes(strict, special, "")
    assert not _takes(strict, special, _written(kind, "look", "{}"))


def test_arguments_are_an_object_where_their_schema_does_not_say_so() -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}
    grammar = tool_grammar(HERMES, [function], ToolChoice(required=True), {})
    assert grammar is not None
    forced = Constraint(ConstraintKind.GRAMMAR, grammar, "tools")
    assert _takes(forced, None, _written("hermes", "f", '{"a": 1}'))
    assert not _takes(forced, None, _written("hermes", "f", "5"))


def test_without_a_forced_or_a_strict_function_the_answer_is_free() -> None:
    assert _constraint("hermes", True, ToolChoice()) is None


@_kinds
def test_an_answer_is_json_or_a_call_where_both_were_asked_for(kind: str) -> None:
    schema = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "integer"}}), "f")
    either = _constraint(kind, True, ToolChoice(), schema)
    assert _takes(either, True, "[1, 2]")
    assert _takes(either, True, _written(kind, "look", _GOOD["look"]))
    assert not _takes(either, True, "Hello")
    forced = _constraint(kind, True, ToolChoice(required=True), schema)
    assert not _takes(forced, True, "[1, 2]")
    with pytest.raises(InvalidInput, match="if the request has tools"):
        _constraint(kind, True, ToolChoice(), Constraint(ConstraintKind.REGEX, "a", "f"))


@pytest.mark.parametrize(
    ("template", "tools", "reasons"),
    [
        ("{{ messages }}", None, False),
        ("<tool_call>{{ tools }}", "hermes", False),
        ("<tool_call>\n<function=", "qwen3_coder", False),
        ("<tool_call>{name}\n<arg_key>", "glm45", False),
        ("<|python_tag|> {{ tools }}", "llama3", False),
        ("[TOOL_CALLS]", "mistral", False),
        ("{% if '</think>' in content %}", None, True),
        (None, None, False),
    ],
)
def test_the_chat_template_shows_how_a_model_writes(template: Any, tools: str | None, reasons: bool) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    found = ChatFormat(tokenizer)
    assert (found.tools, found.reasons) == (tools, reasons)
    named = ChatFormat(tokenizer, "mistral", "think")
    assert (named.tools, named.reasons) == ("mistral", True)
    assert not ChatFormat(tokenizer, "none", "none").reasons
    forced = found.answer(_prompt(ToolChoice(required=True)), "")
    assert forced.calls is not None and forced.constraint is not None


@pytest.mark.parametrize(
    ("ending", "begun"), [("<|assistant|><think>\n", True), ("<|assistant|>", False), ("<think>\n\n</think>\n\n", None)]
)
def test_a_prompt_may_begin_the_reasoning_or_end_it(ending: str, begun: bool | None) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "</think>"
    answer = ChatFormat(tokenizer).answer(ChatPrompt(({"role": "user", "content": "hi"},)), ending)
    assert answer.divides == (begun is not None)
    assert answer.reasoning_marks == (
        None if begun is None else ReasoningMarks("</think>", None if begun else "<think>")
    )
    if begun is not None:
        assert answer.parser().reasons == begun


def test_each_value_of_the_setting_is_a_notation_or_chooses_one() -> None:
    values = get_args(EngineSettings.model_fields["tool_parser"].annotation)
    assert set(values) == {AUTO, TEMPLATE, NONE, *NOTATIONS}
