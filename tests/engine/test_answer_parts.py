"""Reasoning and tool calls are found in an answer's text, however it is split; anything else stays text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlserver_torch_stream.engine.text.answer_format import AnswerParser, Part, Reasoning, ReasoningParser, joined
from mlserver_torch_stream.engine.text.call_reader import JsonScanner
from mlserver_torch_stream.engine.text.tool_parsers import HermesCalls, LlamaCalls, MarkedCalls, MistralCalls
from mlserver_torch_stream.tool_calls import ToolCallDelta, join_calls

_NAMES = ("look", "go_to")
_KINDS: dict[str, type[MarkedCalls]] = {"hermes": HermesCalls, "llama3": LlamaCalls, "mistral": MistralCalls}

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
_arguments = st.dictionaries(st.text(), _json, max_size=3)
_dumped = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    _arguments,
    st.sampled_from([None, 2]),
    st.booleans(),
)
_call = st.tuples(st.sampled_from(_NAMES), _dumped)


def _parser(kind: str, *, reasoning: bool = False, begun: bool = False, parallel: bool = True) -> AnswerParser:
    numbers = iter(range(10**6))
    calls = _KINDS[kind](_NAMES, parallel=parallel)
    calls.new_id = lambda: f"call_{next(numbers)}"
    return AnswerParser(ReasoningParser(begun=begun) if reasoning else None, calls)


def _parse(parser: AnswerParser, pieces: Sequence[str]) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
    """Returns the reasoning, the text and the calls. Calls may interleave, but the pieces of each are in order."""
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.flush()
    calls = [part for part in parts if isinstance(part, ToolCallDelta)]
    begun: set[int] = set()
    for call in calls:  # the name comes first, alone, and only once
        assert (call.name is not None) == (call.index not in begun) == (call.id is not None)
        assert call.index == len(begun) - (call.index in begun)
        assert not (call.name and call.arguments)
        begun.add(call.index)
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return reasoning, "".join(part for part in parts if isinstance(part, str)), join_calls(calls)


def _written(kind: str, calls: Sequence[tuple[str, str]], style: int = 0) -> str:
    """The calls as a model of that kind writes them."""
    key = "parameters" if kind == "llama3" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if kind == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if kind == "llama3":
        return ("" if style == 0 else "<|python_tag|>") + "; ".join(objects)
    if style == 0:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    middle = "" if style == 1 else "[CALL_ID]abc123XYZ"
    return "".join(f"[TOOL_CALLS]{name}{middle}[ARGS]{arguments}" for name, arguments in calls)


def _cut(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[low:high] for low, high in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)])]


_cuts = st.lists(st.integers(0, 10_000), max_size=20)


@pytest.mark.long
@settings(max_examples=60)
@given(st.sampled_from(sorted(_KINDS)), st.lists(_call, min_size=1, max_size=3), st.integers(0, 2), _cuts)
def test_calls_are_read_whatever_the_cuts(kind: str, calls: list[tuple[str, str]], style: int, cuts: list[int]) -> None:
    text = _written(kind, calls, style)
    parser = _parser(kind)
    _, said, read = _parse(parser, _cut(text, cuts))
    assert said == ""
    assert [(call.name, call.arguments) for call in read] == calls
    assert [call.id for call in read] == [f"call_{index}" for index in range(len(calls))]
    assert parser.called


_fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[", "]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
        *('{"name": "look"', ', "arguments": ', ', "parameters": ', "{}", '{"a": [1.5e3, "x\\n"]}', "}", "{"),
        *("\n", " ", "look", '"', "\\", ",", ":", "null", "1", "-", "é", "x", "<think>", "</think>", ";", "<", "</"),
    ]
)
_noise = st.lists(_fragments, max_size=25).map("".join)


@settings(max_examples=60)
@given(st.sampled_from(sorted(_KINDS)), _noise, _cuts, st.booleans(), st.booleans(), st.booleans())
def test_any_text_is_read_alike_whatever_the_cuts(
    kind: str, text: str, cuts: list[int], reasoning: bool, begun: bool, parallel: bool
) -> None:
    def read(pieces: Sequence[str]) -> tuple[Any, ...]:
        parser = _parser(kind, reasoning=reasoning, begun=begun, parallel=parallel)
        return (*_parse(parser, pieces), parser.called, parser.ended)

    assert read(_cut(text, cuts)) == read([text])


@settings(max_examples=60)
@given(st.sampled_from(sorted(_KINDS)), _noise)
def test_without_a_call_the_text_is_the_answer(kind: str, text: str) -> None:
    parser = _parser(kind)
    _, said, read = _parse(parser, [text])
    if not read:
        assert said == text
    elif parser.called:
        assert all(isinstance(json.loads(call.arguments), dict) for call in read)


@settings(max_examples=60)
@given(_json, _cuts)
def test_the_scanner_ends_where_json_does(value: Any, cuts: list[int]) -> None:
    text = json.dumps([value])
    scanner = JsonScanner()
    for position, char in enumerate(text):
        assert not scanner.complete
        assert scanner.push(char), text[: position + 1]
    assert scanner.complete and not scanner.push(" ")


@settings(max_examples=60)
@given(st.text('{}[]",:\\u01e5.-+ntruefals \n', max_size=12))
def test_what_the_scanner_takes_is_what_json_takes(text: str) -> None:
    scanner = JsonScanner()
    taken = all(scanner.push(char) for char in f"[{text}]") and scanner.complete
    try:
        json.loads(f"[{text}]")
        valid = True
    except ValueError:
        valid = False
    assert taken == valid


@pytest.mark.parametrize(
    ("kind", "text", "said", "calls"),
    [
        ("hermes", 'Wait.\n<tool_call>{"name": "look", "arguments": {}}</tool_call>', "Wait.", [("look", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "look"}</tool_call>', "", [("look", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "look"}</tool_call> Done', "Done", [("look", "{}")]),
        ("hermes", '<tool_call>{"name": "look", "arguments": null}', "", [("look", "{}")]),
        ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"a\\": 1}"}', "", [("look", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"a": "</tool_call>"}}</tool_call>', "",
         [("look", '{"a": "</tool_call>"}')]),
        ("hermes", '<tool_call>{"name": "look", "arguments": 3}</tool_call>',
         '<tool_call>{"name": "look", "arguments": 3}</tool_call>', []),
        ("hermes", '<tool_call>{"nome": "look"}</tool_call> ', '<tool_call>{"nome": "look"}</tool_call> ', []),
        ("hermes", "a < b <tool_ c", "a < b <tool_ c", []),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}', "", [("other", "{}")]),
        ("llama3", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        ("llama3", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3", 'I call {"name": "look", "parameters": {}}', 'I call {"name": "look", "parameters": {}}', []),
        ("llama3", '{"type": "function", "name": "look", "parameters": {"a": "b"}}', "", [("look", '{"a": "b"}')]),
        ("mistral", 'Well.[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "x"}]', "Well.", [("look", "{}")]),
        ("mistral", "[TOOL_CALLS]look[ARGS]none", "[TOOL_CALLS]look[ARGS]none", []),
    ],
)  # fmt: skip
def test_spellings_of_calls(kind: str, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    _, text_said, read = _parse(_parser(kind), list(text))
    assert (text_said, [(call.name, call.arguments) for call in read]) == (said, calls)


def test_a_call_that_breaks_is_given_as_text_and_one_that_is_cut_off_is_not() -> None:
    begun = '<tool_call>{"name": "look", "arguments": {"a": '
    broken = _parser("hermes")
    assert _parse(broken, [begun + "oops}}"]) == (
        "",
        begun + "oops}}",
        (ToolCallDelta(0, "call_0", "look", '{"a": '),),
    )
    assert not broken.called
    cut = _parser("hermes")
    assert _parse(cut, [begun]) == ("", "", (ToolCallDelta(0, "call_0", "look", '{"a": '),))
    assert not cut.called


def test_without_parallel_calls_the_answer_ends_with_the_first() -> None:
    for kind in _KINDS:
        parser = _parser(kind, parallel=False)
        _, said, calls = _parse(parser, [_written(kind, [("look", "{}"), ("go_to", "{}")]) + " and so on"])
        assert parser.ended
        assert (said, [call.name for call in calls]) == ("", ["look"])


@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "said"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (True, "Hm.\n\nSo.\n</think>\n\nYes.", "Hm.\n\nSo.", "Yes."),
        (True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (False, "Yes. <think>x</think>", "", "Yes. <think>x</think>"),
        (False, " \n", "", " \n"),
        (True, "a < b </ c </thin", "a < b </ c </thin", ""),
        (False, "<think", "", "<think"),
        (True, "", "", ""),
    ],
)
def test_the_reasoning_is_not_in_the_text(begun: bool, text: str, reasoning: str, said: str) -> None:
    parser = AnswerParser(ReasoningParser(begun=begun), None)
    parts = joined([part for char in text for part in parser.push(char)] + parser.flush())
    assert parts == [part for part in (Reasoning(reasoning), said) if part not in ("", Reasoning(""))]


def test_a_call_within_the_reasoning_is_reasoning() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    reasoning, said, calls = _parse(_parser("hermes", reasoning=True), [f"<think>{call}</think>\n{call}"])
    assert (reasoning, said, len(calls)) == (call, "", 1)
