"""Structured output: how requests of every API ask for it, and which of them are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.constraints import check_finite
from mlserver_torch_stream.protocol.openai_request import decode_body
from mlserver_torch_stream.protocol.v2_request import decode_request
from mlserver_torch_stream.types import Constraint, ConstraintKind, ModelInfo
from tests.protocol.wire import T, over_grpc, over_rest, text

_INFO = ModelInfo(vocab_size=1000, max_model_len=64, max_num_seqs=4, has_chat_template=True)
_SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
_SOURCE = json.dumps(_SCHEMA)


def _schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def _constraint(parameters: dict[str, Any]) -> Constraint | None:
    return decode_body({"prompt": "x", **parameters}, _INFO, "r").constraint


def _refused(parameters: dict[str, Any]) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        _constraint(parameters)
    return caught.value


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_object", "", "response_format")),
        (_schema_format(_SCHEMA), ("json_schema", _SOURCE, "response_format.json_schema.schema")),
        (_schema_format(_SCHEMA, strict=True), ("json_schema", _SOURCE, "response_format.json_schema.schema")),
        ({"structured_outputs": {"json": _SCHEMA}}, ("json_schema", _SOURCE, "structured_outputs.json")),
        ({"structured_outputs": {"json": _SOURCE}}, ("json_schema", _SOURCE, "structured_outputs.json")),
        ({"structured_outputs": {"json_object": True}}, ("json_object", "", "structured_outputs.json_object")),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["é", "b"]}}, ("choice", '["é", "b"]', "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "start: /a/"}}, ("grammar", "start: /a/", "structured_outputs.grammar")),
        ({"structured_outputs": {"json": None, "disable_fallback": False}}, None),
        ({"guided_decoding_guide_type": "json"}, ("json_object", "", "guided_decoding_guide_type")),
        (
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": _SOURCE},
            ("json_schema", _SOURCE, "guided_decoding_guide"),
        ),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"},
            ("regex", "a+", "guided_decoding_guide"),
        ),
        (
            {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "start: /a/"},
            ("grammar", "start: /a/", "guided_decoding_guide"),
        ),
    ],
    ids=str,
)
def test_a_request_says_what_its_answers_must_match(parameters: dict[str, Any], expected: Any) -> None:
    wanted = None if expected is None else Constraint(ConstraintKind(expected[0]), *expected[1:])
    assert _constraint(parameters) == wanted
    as_text = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in parameters.items()}
    for sent in (over_rest(text("x"), parameters=parameters), over_grpc(text("x"), parameters=as_text)):
        assert decode_request(sent, _INFO, streaming=False, request_id="r").constraint == wanted


@pytest.mark.parametrize("name", ["response_format", "guided_decoding_guide_type"])
def test_it_may_be_a_tensor(name: str) -> None:
    value = {"response_format": '{"type": "json_object"}', "guided_decoding_guide_type": "json"}[name]
    sent = over_rest(text("x"), T(name, "BYTES", [value]))
    expected = Constraint(ConstraintKind.JSON_OBJECT, "", name)
    assert decode_request(sent, _INFO, streaming=False, request_id="r").constraint == expected


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        (_schema_format(_SCHEMA, stict=True), "response_format.json_schema.stict"),
        (_schema_format({"x-guidance": {"lenient": True}}), "response_format.json_schema.schema.x-guidance"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide"),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide"),
        ({"guided_decoding_guide": "a", "guided_decoding_guide_type": "xml"}, "guided_decoding_guide_type"),
        ({"guided_json": "{"}, "guided_json"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(parameters: dict[str, Any], field: str) -> None:
    assert _refused(parameters).field == field


_ENDLESS: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "required": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "within an optional property": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/x"}}},
    },
    "two of each other": {
        "anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}],
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1},
        },
    },
    "a map": {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
    "all of": {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": ["object"], "allOf": [{"$ref": "#"}]}}},
}
_FINITE: dict[str, dict[str, Any]] = {
    "a tree": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
    "a list": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "a nullable one": {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "without a type": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "a name with signs": {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "string"}}},
    "elsewhere": {"$ref": "https://example.com/x"},
    "an anchor": {"$ref": "#x"},
    "a property of that name": {"properties": {"$ref": {"type": "string"}}},
}  # fmt: skip


@pytest.mark.parametrize("schema", _ENDLESS.values(), ids=_ENDLESS)
def test_a_schema_with_a_part_that_no_finite_answer_matches_is_refused(schema: dict[str, Any]) -> None:
    refused = _refused(_schema_format(schema))
    assert refused.field == "response_format.json_schema.schema" and "no finite answer" in refused.message


@pytest.mark.parametrize("schema", _FINITE.values(), ids=_FINITE)
def test_recursion_that_can_end_is_taken(schema: dict[str, Any]) -> None:
    assert _constraint(_schema_format(schema)) is not None


def test_a_schema_that_refers_to_itself_in_ever_so_many_ways_is_refused_soon() -> None:
    count = 40
    every = [{"$ref": f"#/$defs/{number}"} for number in range(count)]
    defs = {str(number): {"type": "object", "anyOf": every} for number in range(count)}
    with pytest.raises(InvalidInput, match="too complex to tell whether an answer can end"):
        check_finite("f", {"$ref": "#/$defs/0", "$defs": defs})
    chain: dict[str, Any] = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(5000)}
    with pytest.raises(InvalidInput, match="too complex to tell whether an answer can end"):
        check_finite("f", {"$ref": "#/$defs/0", "$defs": chain})
