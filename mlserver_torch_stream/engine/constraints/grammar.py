"""Writes a constraint as llguidance's grammar, with or without reasoning before the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from mlserver_torch_stream.types import Constraint, ConstraintKind

# JSON as models write it: at most one space after a comma or a colon. Other whitespace is not allowed, because a model
# could write it without end. A schema with keywords that the library cannot enforce is refused.
_JSON: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
_ANSWER = "answer"
_TEXT = "(?s:.*)"
_MAX_GBNF_RULES = 1000  # translating takes quadratic time: half a minute for 6,000 rules


def grammar_of(constraint: Constraint) -> dict[str, Any]:
    """Returns the grammar in llguidance's JSON format. Raises ValueError if the source is not valid for its kind."""
    source = constraint.source
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return _only(LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON))
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return _only(LLMatcher.grammar_from_json_schema(_json(source), overrides=_JSON))
    if constraint.kind is ConstraintKind.REGEX:
        return _only(LLMatcher.grammar_from_regex(source))
    if constraint.kind is ConstraintKind.CHOICE:
        choices = " | ".join(_literal(choice) for choice in json.loads(source))
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}  # one lexeme: a grammar has 2,000 rules at most
    return {"lark_grammar": _lark(source)}


def after_reasoning(
    grammar: dict[str, Any], end: str, end_id: int | None, begin: Sequence[str | int] | None
) -> list[dict[str, Any]]:
    """Returns grammars for any text up to and including the first ``end``, followed by ``grammar``.

    ``end_id`` is the id of the special token ``end``; None if ``end`` consists of text tokens. ``begin`` has the pieces
    (text or ids of special tokens) with which the text before ``grammar`` must begin. If ``begin`` is given, the text
    before ``grammar`` may also be missing.
    """
    if end_id is None:
        reasoning = f"reasoning[suffix={_literal(end)}]: /{_TEXT}/"
    else:  # the same characters in other tokens would not end the reasoning, so they are not allowed
        spelled = re.escape(end).replace("/", r"\/")
        reasoning = f"reasoning: TEXT <[{end_id}]>\nTEXT: /{_TEXT}/ & ~/{_TEXT}{spelled}{_TEXT}/"
    before = "reasoning" if begin is None else f"({' '.join(map(_piece, begin))} reasoning)?"
    return [{"lark_grammar": f"start: {before} @{_ANSWER}\n{reasoning}\n"}, {**grammar, "name": _ANSWER}]


def _only(grammars: str) -> dict[str, Any]:
    only: dict[str, Any] = json.loads(grammars)["grammars"][0]
    return {key: value for key, value in only.items() if value is not None and key != "name"}


def _json(source: str) -> str:
    schema = json.loads(source)
    return json.dumps(schema if isinstance(schema, dict) else {"allOf": [schema]})  # true and false are schemas too


def _piece(piece: str | int) -> str:
    return _literal(piece) if isinstance(piece, str) else f"<[{piece}]>"


def _literal(text: str) -> str:
    return json.dumps(text)


def _lark(source: str) -> str:
    """Returns the source as a Lark grammar. A source in llama.cpp's GBNF is translated."""
    if source.count("::=") > _MAX_GBNF_RULES:
        raise ValueError(f"must have at most {_MAX_GBNF_RULES} rules in GBNF; Lark's language may have more")
    try:
        return str(any_to_lark(source))
    except Exception as error:  # the parser raises errors of several kinds
        raise ValueError(f"is not a grammar in Lark's language or in GBNF: {error}") from error
