"""Answers of a real server that are constrained to a schema, a regex, choices or a grammar, over every API."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests import plain_http
from tests.server import v2
from tests.server.harness import Server
from tests.server.openai import CHAT, TEXT, joined, post, prompt, refused, stream, talk, texts, whole

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_SAMPLED = {"max_tokens": 300, "temperature": 1.2, "seed": 5}
_FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}
_PATTERN = "(ab|cd){2,3}-[0-9]+!"
_OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": _PATTERN}, _PATTERN),
    "choice": ({"choice": ["yes", 'no "no"', "möglich"]}, 'yes|no "no"|möglich'),
    "grammar": ({"grammar": 'start: "<" NUMBER ">"\nNUMBER: /[1-9]{2,5}/'}, "<[1-9]{2,5}>"),
    "gbnf": ({"grammar": 'root ::= "<" [1-9]+ ">"'}, "<[1-9]+>"),
}


# Each of six objects is one of six: 46,656 combinations.
_HUGE = {
    "allOf": [
        {"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {"type": "string"}}} for i in range(6)]}
        for j in range(6)
    ]
}


def _valid(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(("path", "body"), [(CHAT, talk()), (TEXT, prompt())], ids=["chat", "completions"])
def test_openais_answers_match_a_json_schema_streamed_and_whole(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    asked = {**body, **_SAMPLED, **_FORMAT, "n": 3}
    answer = whole(server, path, asked)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    for text in texts(answer):
        _valid(text)
    assert len(set(texts(answer))) == 3
    assert joined(stream(server, path, asked)) == texts(answer)


@pytest.mark.parametrize("key", _OTHERS)
def test_vllms_structured_outputs_are_matched(server: Server, key: str) -> None:
    given, pattern = _OTHERS[key]
    for seed in range(3):
        answer = whole(server, CHAT, talk(**{**_SAMPLED, "seed": seed}, structured_outputs=given))
        assert re.fullmatch(pattern, texts(answer)[0]), texts(answer)
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_json_object_is_one_whatever_it_holds(server: Server) -> None:
    answer = whole(server, CHAT, talk(**_SAMPLED, response_format={"type": "json_object"}))
    text = texts(answer)[0]
    assert text.startswith("{")
    assert answer["choices"][0]["finish_reason"] == "length" or isinstance(json.loads(text), dict)


def test_the_two_log_probabilities_of_a_constrained_token_are_those_of_the_model(server: Server) -> None:
    """They are those of the raw logits, in which a token that the schema forces may be unlikely."""
    answer = whole(server, CHAT, talk(**_SAMPLED, **_FORMAT, logprobs=True, top_logprobs=2))
    content = answer["choices"][0]["logprobs"]["content"]
    assert any(each["logprob"] < min(top["logprob"] for top in each["top_logprobs"]) for each in content)


def test_v2_and_flat_generate_keep_to_it_too(server: Server) -> None:
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)}
    for more in (_FORMAT, guide):
        reply = v2.rest_unary(server.url, "/v2/models/tiny/infer", v2.rest_body("Hello", **_SAMPLED, **more))
        _valid(reply.text)
        response = plain_http.post(
            f"{server.url}/v2/models/tiny/generate",
            json={"text_input": "Hello", "parameters": {**_SAMPLED, **more}},
            timeout=v2.TIMEOUT_S,
        )
        _valid(response.json()["text_output"])
    tensors = [v2.bytes_tensor(name, value) for name, value in guide.items()]
    body = v2.rest_body("Hello", inputs=tensors, **_SAMPLED)
    replies = v2.rest_stream(server.url, "/v2/models/tiny/infer_stream", body)
    _valid(v2.joined(replies))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5)"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"type": "string", "format": "colour"}}, "colour"),
        ({"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, "no finite answer"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)a"}, "look-around"),
        ({"grammar": "start: x"}, "x"),
        ({"grammar": "no grammar"}, "grammar"),
        ({"json": _HUGE}, "too large"),
        ({"choice": ["x" * 200_000]}, "131072 characters"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused_by_name_before_anything_runs(
    server: Server, given: dict[str, Any], said: str
) -> None:
    response = post(server, CHAT, talk(structured_outputs=given))
    assert response.status_code == 400, response.text
    error = refused(response)
    assert error["param"] == f"structured_outputs.{next(iter(given))}" and said in error["message"], error


@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_is_too_large_for_its_first_tokens_is_bad_input(server: Server, stream: bool) -> None:
    """It compiles, as more than 2,000 rules can only follow after its first character."""
    many = " | ".join(f'"a" "{number:04}"' for number in range(2500))
    given = {"structured_outputs": {"grammar": f"start: /[bc]/ ({many})"}, "stream": stream}
    response = post(server, CHAT, talk(**given))
    assert response.status_code == 400, response.text
    error = refused(response)
    assert error["param"] == "structured_outputs.grammar" and "too complex" in error["message"], error


def test_an_answer_that_reaches_max_tokens_says_so(server: Server) -> None:
    answer = whole(server, CHAT, talk(**{**_SAMPLED, "max_tokens": 4}, **_FORMAT))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
