"""Answers are parsed as a tokenizer's ``response_template`` declares, however they are split, and no text is lost.

The templates are those of transformers' documentation and tests for gpt-oss, Gemma 4, Cohere, Qwen 3 and Inkling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response

from mlserver_torch_stream.engine.text.answer_format import AnswerFormat, AnswerParser, Part, Reasoning
from mlserver_torch_stream.engine.text.chat_format import ChatFormat
from mlserver_torch_stream.engine.text.response_template import (
    GLM_PARSER,
    QWEN3_CODER_PARSER,
    AnswerTemplate,
    TemplateParser,
    xml_calls,
)
from mlserver_torch_stream.errors import InvalidInput, SettingsError
from mlserver_torch_stream.tool_calls import ToolCallDelta, ToolChoice, join_calls
from mlserver_torch_stream.types import ChatPrompt, Constraint, ConstraintKind, ReasoningMarks
from tests.engine.tiny_tokenizers import byte_level
from tests.examples import examples

_FUNCTION = {"type": "function", "function": "{content}"}
_CAPTURED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_TEMPLATES: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
            "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
            "tool_calls": {
                "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": _CAPTURED,
            },
        },
    },
    "gemma4": {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": _CAPTURED,
            },
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
        },
    },
    "cohere": {
        "start_anchor": "<|CHATBOT_TOKEN|>",
        "fields": {
            "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
            "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
            "tool_calls": {
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            },
        },
    },
    "qwen3": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _FUNCTION,
            },
            "content": {"close": "<|im_end|>"},
        },
    },
    "inkling": {
        "start_anchor": "<|message_model|>",
        "fields": {
            "content": {
                "open_pattern": r"(?:<\|message_model\|>)?[^<]*<\|content_text\|>",
                "close": "<|end_message|>",
                "repeats": True,
                "join": "",
                "content_args": {"strip": False},
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|message_model\|>)?[^<]*<\|content_invoke_tool_json\|>",
                "close": "<|end_message|>",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.args}"},
                },
            },
        },
    },
}
# Of each: an answer with a reasoning, a call and a text, as far as it has them.
_ANSWERS = {
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Wait.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "h{o}me"}',
    "gemma4": '<|channel>thought\nHm.\n<channel|>Wait.<|tool_call>call:look{at:<|"|>h{o}me<|"|>}<tool_call|>',
    "cohere": "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Wait.<|END_RESPONSE|><|START_ACTION|>[\n"
    '{"tool_call_id": "0", "tool_name": "look", "parameters": {"at": "h{o}me"}}\n]<|END_ACTION|>',
    "qwen3": "<think>\nHm.\n</think>\n\nWait.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "h{o}me"}}\n</tool_call>',
    "inkling": "Bob<|content_text|>Wait.<|end_message|><|message_model|>Bob<|content_invoke_tool_json|>"
    '{"name": "look", "args": {"at": "h{o}me"}}<|end_message|>',
}
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "properties": {"at": {"type": "string"}, "far": {"type": "boolean"}, "n": {"type": "integer"}}
            },
        },
    },
)
_XML = {
    QWEN3_CODER_PARSER: "<tool_call>\n<function=look>\n<parameter=at>\n7\n\n</parameter>\n<parameter=far>\ntrue\n"
    "</parameter>\n<parameter=n>7</parameter>\n</function>\n</tool_call>",
    GLM_PARSER: "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>7\n</arg_value>\n<arg_key>far</arg_key>\n"
    "<arg_value>true</arg_value>\n<arg_key>n</arg_key><arg_value>7</arg_value>\n</tool_call>",
}
_names = pytest.mark.parametrize("name", _TEMPLATES)


def _parser(name: str, *, prefix: str = "", tools: Any = _TOOLS, **options: Any) -> AnswerParser:
    template = xml_calls(name) if name in _XML else AnswerTemplate(_TEMPLATES[name])
    return AnswerParser(None, TemplateParser(template, prefix, tools, **options))


def _parse(parser: AnswerParser, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str | None, str]]]:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.flush()
    calls = join_calls(part for part in parts if isinstance(part, ToolCallDelta))
    assert [call.index for call in calls] == list(range(len(calls))) and all(call.id for call in calls)
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    text = "".join(part for part in parts if isinstance(part, str))
    return reasoning, text, [(call.name, call.arguments) for call in calls]


def _cut(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[low:high] for low, high in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)])]


_cuts = st.lists(st.integers(0, 10_000), max_size=20)


@settings(max_examples=60)
@given(st.sampled_from(sorted(_TEMPLATES)), _cuts)
def test_an_answer_is_divided_as_transformers_divides_it_whatever_the_cuts(name: str, cuts: list[int]) -> None:
    text = _ANSWERS[name]
    parser = _parser(name)
    reasoning, said, calls = _parse(parser, _cut(text, cuts))
    message = parse_response(text, _TEMPLATES[name], prefix="")
    assert (reasoning, said) == (message.get("thinking", ""), message["content"])
    assert [{"name": call[0], "arguments": json.loads(call[1])} for call in calls] == [
        call["function"] for call in message["tool_calls"]
    ]
    assert parser.called and (calls[0][0], json.loads(calls[0][1])) == ("look", {"at": "h{o}me"})


_fragments = st.sampled_from(
    [
        *("<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|call|>", "commentary to=functions.look "),
        *("<|start|>assistant", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", '{"name": "look"'),
        *(', "arguments": {}', ', "args": {"a": [1, "x"]}', "<|channel>thought\n", "<channel|>", "{", "}"),
        *("<|tool_call>call:look", "<tool_call|>", '<|"|>', "<|START_ACTION|>", "<|END_ACTION|>", "]"),
        *('[{"tool_name": "look", "parameters": {}}', "<|content_text|>", "<|content_invoke_tool_json|>"),
        *("<|end_message|>", "<function=look>", "<parameter=at>", "</parameter>", "</function>", "look\n"),
        *("<arg_key>n</arg_key>", "<arg_value>", "</arg_value>", "<", "|", ">"),
        *(" ", "\n", "word", ",", '"', "\x01", "é"),
    ]
)
_noise = st.lists(_fragments, max_size=25).map("".join)
_parsers = st.sampled_from(sorted([*_TEMPLATES, *_XML]))


@examples(150)
@given(_parsers, _noise, _cuts, st.booleans(), st.booleans(), st.sampled_from([None, _TOOLS]))
def test_any_text_is_divided_alike_whatever_the_cuts(
    name: str, text: str, cuts: list[int], parallel: bool, reasoning: bool, tools: Any
) -> None:
    def read(pieces: Sequence[str]) -> tuple[Any, ...]:
        parser = _parser(name, parallel=parallel, reasoning=reasoning, tools=tools)
        return (*_parse(parser, pieces), parser.called, parser.ended, parser.reasons)

    assert read(_cut(text, cuts)) == read([text])


@examples(150)
@given(_parsers, _noise)
def test_words_are_never_lost(name: str, text: str) -> None:
    """Every word is in the reasoning, the text or a call's arguments, except in marks that begin a message."""
    reasoning, said, calls = _parse(_parser(name), [text])
    found = "".join([reasoning, said, *(arguments for _, arguments in calls)])
    words = text.replace("<|message_model|>", "").count("word")
    if name in ("gpt-oss", "inkling"):  # whose marks may have words in them
        assert found.count("word") <= words
    elif not calls:
        assert found.count("word") == words


@_names
def test_without_a_call_that_is_whole_its_text_is_given(name: str) -> None:
    begin = _ANSWERS[name].partition('"h{o}me"')[0].partition('<|"|>h{o}me')[0]
    _, said, calls = _parse(_parser(name), [begin + "oops}}" + " and more"])
    assert "oops}} and more" in said and said.startswith("Wait.")
    assert calls in ([], [("look", '{"at": ')])
    parser = _parser(name)
    _, said, cut = _parse(parser, [begin])
    assert not parser.called
    assert (cut, said) == ([("look", '{"at": ')], "Wait.") or name == "gemma4"


@_names
def test_arguments_come_before_the_call_is_whole(name: str) -> None:
    parts = _parser(name).push(_ANSWERS[name].partition("{o}")[0])
    calls = join_calls(part for part in parts if isinstance(part, ToolCallDelta))
    if name == "gemma4":  # which writes no JSON: it is read when it is whole
        assert calls == ()
    else:
        assert [(call.name, call.arguments) for call in calls] == [("look", '{"at": "h')]


def test_a_prompt_that_has_begun_the_reasoning_and_one_that_continues_a_text() -> None:
    begun = _parser("qwen3", prefix="<|im_start|>user\n<think><|im_start|>assistant\n<think>\n")
    assert begun.reasons and _parse(begun, ["\nHm.</think> Yes."]) == ("Hm.", "Yes.", [])
    assert _parse(_parser("qwen3", prefix="Once upon"), [" a time"]) == ("", " a time", [])


def test_without_tools_and_without_reasoning_the_marks_are_text() -> None:
    for name in ("gpt-oss", "qwen3"):
        _, said, calls = _parse(_parser(name, tools=None, reasoning=False), [_ANSWERS[name]])
        assert not calls and "look" in said and "Hm." in said
        assert ("<tool_call>" in said and "</think>" in said) or "<|channel|>analysis" in said


@pytest.mark.parametrize("name", _XML)
def test_xml_arguments_have_the_types_of_the_schema(name: str) -> None:
    parser = _parser(name)
    _, said, calls = _parse(parser, ["Wait.\n", _XML[name], "\n", _XML[name], " Done"])
    assert said == "Wait.Done" and [call[0] for call in calls] == ["look", "look"] and parser.called
    assert json.loads(calls[0][1]) == {"at": "7\n", "far": True, "n": 7}
    only = _parser(name, parallel=False)
    assert len(_parse(only, [_XML[name] * 2])[2]) == 1 and only.ended


@pytest.mark.parametrize("name", _XML)
def test_xml_arguments_come_one_by_one(name: str) -> None:
    """Each argument is sent as soon as its end is read. If the call breaks later, it is sent as text, too."""
    parser = _parser(name)
    pieces = [each for char in _XML[name] for each in parser.push(char) if isinstance(each, ToolCallDelta)]
    assert [piece.arguments for piece in pieces if piece.arguments] == [
        '{"at": "7\\n"',
        ', "far": true',
        ', "n": 7',
        "}",
    ]
    broken = _XML[name].replace("</tool_call>", "and so on</tool_call>")
    parser = _parser(name)
    assert _parse(parser, [broken]) == ("", broken, [("look", '{"at": "7\\n", "far": true, "n": 7')])
    assert not parser.called
    cut, _, _ = _XML[name].partition("true")
    parser = _parser(name)
    assert _parse(parser, [cut]) == ("", "", [("look", '{"at": "7\\n"')]) and not parser.called
    early = _XML[name].replace("look", "look at")
    assert _parse(_parser(name), [early]) == ("", early, [])


@pytest.mark.parametrize("name", _XML)
def test_an_xml_argument_that_comes_twice_breaks_its_call(name: str) -> None:
    twice = _XML[name].replace("far", "at")
    assert _parse(_parser(name), [twice])[1] == twice


def _tokenizer(folder: Path, template: dict[str, Any], chat_template: str = "{{ tools }}") -> PreTrainedTokenizerBase:
    """A tokenizer from a folder whose ``tokenizer_config.json`` declares the template, as in a published model."""
    tokenizer = byte_level()
    marks = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|channel>", "<channel|>", "<unused>"]
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": template}))
    return AutoTokenizer.from_pretrained(folder)


def _asked(choice: ToolChoice | None = None) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": "hi"},), _TOOLS, choice or ToolChoice())


def test_what_a_tokenizer_declares_comes_before_what_its_chat_template_shows(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, _TEMPLATES["gpt-oss"], "{{ tools }}[TOOL_CALLS]")
    found = ChatFormat(tokenizer)
    assert (found.tools, found.reasons) == ("template", True)
    answer = found.answer(_asked(), "<|start|>assistant")
    assert _parse(answer.parser(), [_ANSWERS["gpt-oss"]]) == ("Hm.", "Wait.", [("look", '{"at": "h{o}me"}')])
    named = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    assert answer.marks == frozenset(tokenizer.convert_tokens_to_ids(named))
    assert ChatFormat(tokenizer, "mistral").tools == "mistral"
    assert not ChatFormat(tokenizer, "template", "none").reasons
    forced = found.answer(_asked(ToolChoice(required=True)), "")
    assert forced.constraint is not None and "[TOOL_CALLS]" in forced.constraint.source


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = _tokenizer(tmp_path, {"version": 9, "fields": {}})
    assert ChatFormat(tokenizer).tools is None and "version: 9" in caplog.text
    with pytest.raises(SettingsError, match=r"tool_parser.*version: 9"):
        ChatFormat(tokenizer, "template")
    with pytest.raises(SettingsError, match="has none"):
        ChatFormat(byte_level(), "template")


@pytest.mark.parametrize("name", ["gpt-oss", *_XML])
def test_calls_without_a_grammar_are_forced_as_hermes_writes_them(tmp_path: Path, name: str) -> None:
    tokenizer = _tokenizer(tmp_path, _TEMPLATES["gpt-oss"])
    found = ChatFormat(tokenizer, name if name in _XML else "auto")
    forced = found.answer(_asked(ToolChoice(required=True)), "")
    written = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert forced.constraint is not None and _parse(forced.parser(), [written])[2] == [("look", "{}")]
    with pytest.raises(InvalidInput, match="strict"):
        found.answer(_asked(ToolChoice(strict=frozenset({"look"}))), "")
    with pytest.raises(InvalidInput, match="if the request has tools") as refused:
        found.answer(_asked(), "", Constraint(ConstraintKind.JSON_OBJECT, "", "response_format"))
    assert refused.value.field == "response_format"


@pytest.mark.parametrize(
    ("name", "ending", "marks"),
    [
        ("gemma4", "<|turn>model\n", ReasoningMarks("<channel|>", "<|channel>thought\n")),
        ("gemma4", "<|turn>model\n<|channel>thought\n", ReasoningMarks("<channel|>")),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", None),
        ("gpt-oss", "<|start|>assistant", None),
    ],
)
def test_a_constraint_holds_after_the_reasoning(
    tmp_path: Path, name: str, ending: str, marks: ReasoningMarks | None
) -> None:
    found = ChatFormat(_tokenizer(tmp_path, _TEMPLATES[name]))
    answer: AnswerFormat = found.answer(ChatPrompt(({"role": "user", "content": "hi"},)), ending)
    assert answer.reasoning_marks == marks


def test_a_mark_with_an_optional_end_is_read_alike_whatever_the_cuts() -> None:
    """transformers' parser decides about such a mark from the text that has arrived so far."""
    field = {"open": "<t>", "close_pattern": r"</t>(?:\s*</u>)?"}
    template = AnswerTemplate({"start_anchor": "<a>", "fields": {"thinking": field, "content": {}}})
    text = "<t>Hm.</t> </u>Yes."
    found = {
        _parse(AnswerParser(None, TemplateParser(template, "", None)), pieces)[:2] for pieces in ([text], list(text))
    }
    assert len(found) == 1
