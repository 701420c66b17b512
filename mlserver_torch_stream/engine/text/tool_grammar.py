"""Writes the grammar of an answer that must call functions, or whose calls must match the functions' schemas.

The grammar is Lark's, as llguidance reads it. Knows nothing of the compiler.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.tool_calls import ToolChoice
from mlserver_torch_stream.types import Constraint, ConstraintKind

# JSON as models write it: free whitespace would let a model write whitespace without end.
_JSON = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ANY: Mapping[str, Any] = {"type": "object"}
_NO_GBNF = "\\u003a:="  # llguidance takes a text with "::=" for a grammar of llama.cpp
_TEXT = "TEXT: /(?s:.*)/\n"


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a call is written: ``begin``, in which the function's name replaces ``NAME``, the arguments, and ``end``.

    ``mark`` begins a call, or a list: ``open``, calls with ``between`` in between, and ``close``. If the mark is
    ``optional``, a call without it can be the whole answer. ``several``: an answer can have several calls.
    """

    mark: str
    begin: str
    end: str = ""
    open: str = ""
    between: str | None = None  # None: a second call begins as the first does
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
    """Returns None if any answer is allowed. ``tokens`` has the ids of the marks that are one token each.

    An answer without calls must match ``answer``, which is in Lark's language; None: it can be any text.
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
    """Returns a JSON schema in Lark's language. Raises InvalidInput for a constraint of another kind."""
    if constraint.kind not in (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT):
        raise InvalidInput(constraint.field, "beside tools only JSON is implemented")
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
    """Returns the rules of any text in which each mark begins calls."""
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
    """Returns a text for a grammar. Marks in it that are one token are written as that token."""
    marks = "|".join(map(re.escape, tokens))
    parts = re.split(f"({marks})", text) if marks else [text]
    return " ".join(_marked(part, tokens) for part in parts if part)
