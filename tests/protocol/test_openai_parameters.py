"""One model defines the fields of OpenAI's bodies: the decoder, the OpenAPI document and the page agree with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.bodies import Body, Refused, fields, taken_values, treatment
from mlserver_torch_stream.protocol.openai_document import openai_document
from mlserver_torch_stream.protocol.openai_models import ChatCompletionRequest, CompletionRequest, ModelResponseRequest
from mlserver_torch_stream.protocol.openai_spelling import (
    OPENAI_CHAT,
    OPENAI_COMPLETIONS,
    OPENAI_RESPONSES,
    OpenAISpelling,
)
from mlserver_torch_stream.protocol.spelling import PostedBody
from mlserver_torch_stream.protocol.values import MAX_IGNORED, unknown_parameters
from mlserver_torch_stream.types import ChatPrompt, GenerationRequest, ModelInfo
from tests import markdown
from tests.examples import examples
from tests.protocol.test_v2_fuzz import any_text, json_value

_INFO = ModelInfo(
    vocab_size=100,
    max_model_len=64,
    max_num_seqs=4,
    has_chat_template=True,
    tool_parser="hermes",
    template_arguments=frozenset({"tools"}),
)
_LEAST: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
    "completions": {"model": "m", "prompt": "Hello"},
    "responses": {"model": "m", "input": "Hello"},
}
_SPELLINGS: dict[str, OpenAISpelling] = {
    "chat": OPENAI_CHAT,
    "completions": OPENAI_COMPLETIONS,
    "responses": OPENAI_RESPONSES,
}
_SCHEMAS = {"chat": "ChatCompletionRequest", "completions": "CompletionRequest", "responses": "ModelResponseRequest"}
_endpoints = pytest.mark.parametrize("endpoint", _SPELLINGS)

# Every kind of value at least near what some parameter takes.
_text = st.text(max_size=4)
_value = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(-3, 3) | _text | st.sampled_from(["auto", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["include_usage", "type", "text", "role", "content", "7"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def _bodies(endpoint: str) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(sorted(fields(_SPELLINGS[endpoint].body)))
    return st.dictionaries(names, _value, max_size=4).map(lambda given: {**_LEAST[endpoint], **given})


@cache
def _validator(endpoint: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{_SCHEMAS[endpoint]}", "components": openai_document()["components"]}
    return jsonschema.Draft202012Validator(_with_unknown_nulls(schema))


def _with_unknown_nulls(schema: Any) -> Any:
    """Returns the schema with a rule that the document lacks: an unknown field that is null counts as absent."""
    if isinstance(schema, list):
        return [_with_unknown_nulls(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    said = {key: _with_unknown_nulls(each) for key, each in schema.items()}
    return {**said, "additionalProperties": {"type": "null"}} if said.get("additionalProperties") is False else said


def _refusal(body: Mapping[str, Any], model: type[Body]) -> InvalidInput | None:
    try:
        taken_values(body, model, 4096)
    except InvalidInput as refused:
        return refused
    return None


@pytest.mark.long
@_endpoints
@examples(400)
@given(data=st.data())
def test_the_document_accepts_a_body_exactly_where_the_model_does(endpoint: str, data: st.DataObject) -> None:
    body = data.draw(_bodies(endpoint))
    refused = _refusal(body, _SPELLINGS[endpoint].body)
    assert (refused is None) == _validator(endpoint).is_valid(body), refused


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"stop": ["x"] * 16}, True),
        ({"stop": ["x"] * 17}, False),
        ({"stop": [""]}, False),
        ({"n": 1.0}, True),
        ({"n": True}, False),
        ({"seed": -(2**63)}, True),
        ({"seed": -(2**63) * 1.0001}, False),
        ({"n": 0}, False),
        ({"best_of": 1.0}, True),
        ({"best_of": True}, False),
        ({"top_p": 0}, False),
        ({"top_p": 1}, True),
        ({"logprobs": 20}, True),
        ({"logprobs": 21}, False),
        ({"prompt": []}, False),
        ({"prompt": [-1]}, False),
        ({"prompt": [[]]}, False),
        ({"stream_options": {"include_usage": None}}, True),
        ({"stream_options": {"x": 1}}, False),
        ({"prompt": None}, False),
    ],
    ids=str,
)
def test_they_agree_at_the_bounds(given: dict[str, Any], accepted: bool) -> None:
    body = {**_LEAST["completions"], **given}
    assert (_refusal(body, CompletionRequest) is None) == accepted
    assert _validator("completions").is_valid(body) == accepted


@_endpoints
@examples(500)
@given(data=st.data(), value=json_value | _value, streaming=st.booleans())
def test_any_value_of_any_parameter_is_understood_or_refused_by_its_name(
    endpoint: str, data: st.DataObject, value: Any, streaming: bool
) -> None:
    name = data.draw(st.sampled_from(sorted(fields(_SPELLINGS[endpoint].body))))
    outcome = _outcome(endpoint, {**_LEAST[endpoint], name: value}, streaming)
    if isinstance(outcome, InvalidInput):
        assert outcome.field.startswith(name) and len(outcome.message.encode()) < 2000


@_endpoints
@examples(200)
@given(
    body=json_value.filter(lambda value: isinstance(value, dict)) | st.dictionaries(any_text, json_value, max_size=3)
)
def test_any_object_is_understood_or_refused(endpoint: str, body: dict[str, Any]) -> None:
    refused = _outcome(endpoint, body, False)
    assert isinstance(refused, InvalidInput)
    json.dumps(OPENAI_CHAT.refusal(refused), ensure_ascii=False).encode()


def _outcome(endpoint: str, body: dict[str, Any], streaming: bool) -> GenerationRequest | InvalidInput:
    try:
        return _SPELLINGS[endpoint].decode(PostedBody(body), _INFO, streaming=streaming, request_id="r")
    except InvalidInput as refused:
        return refused


@_endpoints
def test_null_is_as_good_as_nothing(endpoint: str) -> None:
    spelling = _SPELLINGS[endpoint]
    optional = {name: None for name, field in fields(spelling.body).items() if not field.is_required()}
    body = {**_LEAST[endpoint], **optional, "nobody_knows_it": None, "best_off": None}
    assert _outcome(endpoint, body, False) == _outcome(endpoint, _LEAST[endpoint], False)


@pytest.mark.parametrize(
    ("endpoint", "name", "value"),
    [
        ("chat", "stream_options", {"include_usage": True}),
        ("chat", "messages", [{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
        ("chat", "tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        ("chat", "response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}),
        ("completions", "structured_outputs", {"regex": "a"}),
        ("responses", "text", {"format": {"type": "json_object"}}),
        ("responses", "input", [{"type": "message", "role": "user", "content": "a"}]),
        ("responses", "reasoning", {"effort": "none"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_null_in_an_object_is_as_good_as_nothing(endpoint: str, name: str, value: Any) -> None:
    def with_nulls(value: Any) -> Any:
        if isinstance(value, list):
            return [with_nulls(each) for each in value]
        return value if not isinstance(value, dict) else {**value, "nobody_knows_it": None}

    nested = with_nulls(value)
    for body in (value, nested):
        assert isinstance(_outcome(endpoint, {**_LEAST[endpoint], name: body}, True), GenerationRequest)
    assert _validator(endpoint).is_valid({**_LEAST[endpoint], name: nested})


def test_an_answer_comes_back_as_litellm_sends_it() -> None:
    """The recorded second turn of a conversation: the client adds its own keys to the message that it has received."""
    call = {"function": {"arguments": '{"city": "Paris"}', "name": "f"}, "id": "call_1", "type": "function"}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None}
    thoughts = {"thinking_blocks": [{"type": "thinking", "thinking": "Hm."}], "reasoning_items": [{"id": "rs_1"}]}
    proxied = {**answer, **thoughts, "provider_specific_fields": {"refusal": None}, "reasoning_details": [{}]}
    turns = [
        {"role": "user", "content": "Hello", "cache_control": {"type": "ephemeral"}},
        {**proxied, "id": "msg_1"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    request = _outcome("chat", {**_LEAST["chat"], "messages": turns}, False)
    assert isinstance(request, GenerationRequest), request
    answered = request.prompts[0].messages[1]  # type: ignore[union-attr]
    assert answered.keys() == {"role", "content", "tool_calls"}, "a chat template sees no metadata"


def test_an_answer_comes_back_as_the_openai_sdk_has_parsed_it() -> None:
    """Recorded from chat.completions.parse, whose messages and calls also have the parsed objects."""
    function = {"name": "f", "arguments": '{"city": "Paris"}', "parsed_arguments": {"city": "Paris"}}
    turns = [
        {"role": "assistant", "content": '{"city": "Rome"}', "parsed": {"city": "Rome"}},
        {"role": "assistant", "parsed": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    request = _outcome("chat", {**_LEAST["chat"], "messages": turns}, False)
    assert isinstance(request, GenerationRequest), request
    answered, called, _ = request.prompts[0].messages  # type: ignore[union-attr]
    assert answered == {"role": "assistant", "content": '{"city": "Rome"}'}
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Paris"}}


def test_the_result_of_a_call_may_name_its_tool() -> None:
    result = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    for more in ({}, {"name": "f", "namespace": "weather"}):
        request = _outcome("responses", {**_LEAST["responses"], "input": [{**result, **more}]}, False)
        assert isinstance(request, GenerationRequest), request
        (answered,) = request.prompts[0].messages  # type: ignore[union-attr]
        assert answered == {"role": "tool", "tool_call_id": "c", "content": "sunny"}


def test_no_alternatives_need_no_logprobs() -> None:
    alone = _outcome("chat", _LEAST["chat"], False)
    assert _outcome("chat", {**_LEAST["chat"], "logprobs": False, "top_logprobs": 0}, False) == alone


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
@pytest.mark.parametrize(
    "role", ["user\n", "<|im_start|>", "a b", "system<|im_end|>\n<|im_start|>system", "é", "u" * 65]
)
def test_a_role_has_no_marks_of_a_template(endpoint: str, role: str) -> None:
    name = {"chat": "messages", "responses": "input"}[endpoint]
    refused = _outcome(endpoint, {**_LEAST[endpoint], name: [{"role": role, "content": "a"}]}, False)
    assert isinstance(refused, InvalidInput) and refused.field == name and "role" in refused.message


@pytest.mark.parametrize("name", ["<|im_end|>", "a\nb", "a b", "a\u2028b", "\x00", "[/INST]"])
def test_a_name_has_no_marks_of_a_template(name: str) -> None:
    refused = _outcome("chat", {**_LEAST["chat"], "messages": [{"role": "user", "name": name, "content": "a"}]}, False)
    assert isinstance(refused, InvalidInput) and refused.field == "messages" and "name" in refused.message


def test_roles_and_names_of_all_families_are_taken() -> None:
    for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython", "available_tools", "model"):
        said = [{"role": role, "name": "Jürgen-1.b", "content": "a"}, {"role": "user", "content": "b"}]
        assert isinstance(_outcome("chat", {**_LEAST["chat"], "messages": said}, False), GenerationRequest)


def test_a_seed_that_a_parser_has_rounded_is_refused() -> None:
    """The parsed ``-9223372036854775809`` is the float of the smallest seed."""
    refused = _refusal({**_LEAST["completions"], "seed": json.loads("-9223372036854775809.0")}, CompletionRequest)
    assert refused is not None and refused.field == "seed"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tools", [{"type": "web_search"}], "tools[0].type: only functions are implemented, got 'web_search'"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type: only parts of text are implemented, got 'image_url'",
        ),
        ("audio", {"voice": "x"}, "audio: is not implemented by this runtime"),
        ("max_tokens", 0, "max_tokens: must be greater than or equal to 1, got 0"),
        ("stop", 3, "stop: must be a string or a list, got 3"),
        ("tolls", [], "tolls: unknown parameter; did you mean tools?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_says_why(name: str, value: Any, said: str) -> None:
    refused = _refusal({**_LEAST["chat"], name: value}, ChatCompletionRequest)
    assert refused is not None and refused.message == said


def test_usage_on_every_chunk_needs_the_usage() -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    refused = _outcome("chat", {**_LEAST["chat"], "stream_options": options}, True)
    assert isinstance(refused, InvalidInput) and refused.field == "stream_options.continuous_usage_stats"


@_endpoints
def test_what_is_ignored_changes_nothing_and_what_is_refused_has_harmless_values(endpoint: str) -> None:
    alone = _outcome(endpoint, _LEAST[endpoint], False)
    for name, field in fields(_SPELLINGS[endpoint].body).items():
        if treatment(field) == "ignored":
            values = ("x", {"a": "b"}, False)
            outcomes = [_outcome(endpoint, {**_LEAST[endpoint], name: value}, False) for value in values]
            assert outcomes.count(alone) == 1, name
        for value in (each for kind in field.metadata if isinstance(kind, Refused) for each in kind.harmless):
            assert _outcome(endpoint, {**_LEAST[endpoint], name: value}, False) == alone, name


def test_a_conversation_may_hold_an_answer_as_the_sdk_has_dumped_it() -> None:
    optional = ("refusal", "annotations", "audio", "function_call", "tool_calls", "name", "reasoning_content")
    dumped = [{"role": "assistant", "content": "b", **dict.fromkeys(optional)}, {"role": "user", "content": "c"}]
    request = _outcome("chat", {**_LEAST["chat"], "messages": dumped}, False)
    assert isinstance(request, GenerationRequest), request
    # A chat template asks whether a message has tool calls, not whether they are null.
    assert request.prompts[0].messages[0] == {"role": "assistant", "content": "b"}  # type: ignore[union-attr]
    told = _outcome("chat", {**_LEAST["chat"], "messages": [{**dumped[0], "annotations": []}]}, False)
    assert isinstance(told, GenerationRequest)


_MANY = 200_000


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("completions", {"prompt": ["a"] * _MANY}),
        ("completions", {"prompt": [[1]] * _MANY}),
        ("completions", {"prompt": [1] * _MANY}),
        ("completions", {"prompt": [[1] * (_MANY // 100)] * 100}),
        ("chat", {"messages": [{"role": "user", "content": "a"}] * _MANY}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * _MANY}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100}] * (_MANY // 100)}),
        ("chat", {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}] * _MANY}]}),
        ("responses", {"input": [{"role": "user", "content": "a"}] * _MANY}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * _MANY}]}),
        ("responses", {"input": [{"type": "reasoning", "summary": [{}] * 100}] * (_MANY // 100)}),
        ("chat", {"stop_token_ids": [1] * _MANY}),
        ("chat", {"stop_token_ids": [1.0] * _MANY}),
        ("chat", {"logit_bias": {str(token): 1 for token in range(_MANY)}}),
    ],
)
def test_a_value_of_too_many_elements_is_refused_before_python_has_looked_at_each(
    endpoint: str, body: dict[str, Any]
) -> None:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        refused = _outcome(endpoint, {**_LEAST[endpoint], **body}, False)
    finally:
        sys.setprofile(None)
    assert isinstance(refused, InvalidInput) and refused.field.startswith(next(iter(body)))
    assert calls < _MANY / 2


def test_ids_beyond_the_context_have_the_code_that_clients_know() -> None:
    refused = _outcome("completions", {**_LEAST["completions"], "prompt": [1] * 10_000}, False)
    assert isinstance(refused, InvalidInput) and refused.code == "context_length_exceeded"


def test_a_request_says_what_was_asked_for() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    asked = {**_LEAST["chat"], **body, "stop": '["x"]', "n": 2, "top_k": 5, "priority": 3, "logprobs": True}
    request = _outcome("chat", {**asked, "stream_options": {"include_usage": True}}, True)
    assert isinstance(request, GenerationRequest)
    assert request.prompts[0].messages == ({"role": "user", "content": "ab"},)  # type: ignore[union-attr]
    assert request.sampling.stop == ('["x"]',)  # a text, which elsewhere may be a list as JSON
    assert (request.sampling.n, request.sampling.top_k, request.priority) == (2, 5, 3)
    assert request.sampling.logprobs and request.reply.usage_message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stop": ["x"] * 1_000_000}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(1000)}}, "logit_bias"),
        ({"n": 1_000_000_000}, "n"),
        ({"prompt": ["x"] * 1_000_000}, "prompt"),
        ({"prompt": [1] * 1_000_000}, "prompt"),
        ({"stop_token_ids": [1] * 100_000}, "stop_token_ids"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"x" * 1_000_000: 1}, "x" * 100),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:20],
)
def test_what_is_too_much_is_refused_by_its_name(body: dict[str, Any], field: str) -> None:
    refused = _outcome("completions", {**_LEAST["completions"], **body}, False)
    assert isinstance(refused, InvalidInput) and refused.field == field and len(refused.message) < 500


_DEFAULTS_OF_VLLM = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "add_special_tokens": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "include_reasoning": True,
    "truncate_prompt_tokens": None,
    "return_token_ids": None,
    "echo": False,
    "mm_processor_kwargs": {},
    "request_id": "a",
    "service_tier": "flex",
    "cache_prompt": True,
}


def test_a_client_may_send_all_its_defaults() -> None:
    """The defaults have no effect, or are metadata; a null has no effect even if the parameter is unknown."""
    asked = _outcome("chat", {**_LEAST["chat"], **_DEFAULTS_OF_VLLM, "anything": None}, False)
    assert isinstance(asked, GenerationRequest), asked
    assert asked.prompts[0].begins_answer  # type: ignore[union-attr]
    for name, value in (("use_beam_search", True), ("truncate_prompt_tokens", 5), ("verbosity", "low")):
        refused = _outcome("chat", {**_LEAST["chat"], name: value}, False)
        assert isinstance(refused, InvalidInput) and refused.field == name and "not implemented" in refused.message


def test_where_the_setting_says_so_unknown_names_are_noted_and_nothing_else_is_let_through() -> None:
    messages = [{"role": "user", "content": "Hello", "nobody": 1}]
    body = {**_LEAST["chat"], "messages": messages, "nobody_knows_it": 1, "stream_options": {"x": 2}}
    alone = _outcome("chat", {**_LEAST["chat"], "stream_options": {}}, True)
    with unknown_parameters(ignored=True) as names:
        assert _outcome("chat", body, True) == alone
        assert sorted(names) == ["nobody", "nobody_knows_it", "x"]
        for name, value in (("audio", {}), ("temperature", "hot"), ("best_of", 2)):
            refused = _outcome("chat", {**_LEAST["chat"], name: value}, False)
            assert isinstance(refused, InvalidInput) and refused.field == name
        _outcome("chat", {**_LEAST["chat"], **{f"x{number}": 1 for number in range(1000)}}, False)
    assert len(names) == MAX_IGNORED
    assert isinstance(_outcome("chat", {**_LEAST["chat"], "nobody_knows_it": 1}, False), InvalidInput)


@pytest.mark.parametrize(
    ("more", "last", "ends"),
    [
        ({}, "user", "begun"),
        ({}, "assistant", "continued"),
        ({"add_generation_prompt": True, "continue_final_message": False}, "assistant", "begun"),
        ({"continue_final_message": False}, "assistant", "begun"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "user", "continued"),
        ({"add_generation_prompt": False}, "user", "open"),
    ],
)
def test_a_conversation_ends_as_its_client_says(more: dict[str, Any], last: str, ends: str) -> None:
    request = _outcome("chat", {**_LEAST["chat"], "messages": [{"role": last, "content": "a"}], **more}, False)
    assert isinstance(request, GenerationRequest), request
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.begins_answer, prompt.continues) == (ends == "begun", ends == "continued")


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": None, "tool_calls": []}, {"content": []}])
def test_an_answer_may_have_been_empty(empty: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", **empty}, {"role": "user", "content": "b"}]
    request = _outcome("chat", {**_LEAST["chat"], "messages": turns}, False)
    assert isinstance(request, GenerationRequest), request
    assert request.prompts[0].messages[1]["content"] == ""  # type: ignore[union-attr]
    refused = _outcome("chat", {**_LEAST["chat"], "messages": [{"role": "user", "content": None}]}, False)
    assert isinstance(refused, InvalidInput)


def test_tools_without_a_notation_say_what_to_do() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidInput, match=r'tool_choice: "required".*setting tool_parser'):
        posted = PostedBody({**_LEAST["chat"], "tools": tools})
        OPENAI_CHAT.decode(posted, replace(_INFO, tool_parser=None), streaming=False, request_id="r")


def test_a_message_cannot_be_continued_after_a_generation_prompt() -> None:
    refused = _outcome("chat", {**_LEAST["chat"], "add_generation_prompt": True, "continue_final_message": True}, False)
    assert isinstance(refused, InvalidInput) and refused.field == "continue_final_message"


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_guided_is_an_older_name_of_structured_outputs(kind: str) -> None:
    value = {"json": {"type": "string"}, "choice": ["a", "b"]}.get(kind, "a|b")
    older = _outcome("completions", {**_LEAST["completions"], f"guided_{kind}": value}, False)
    newer = _outcome("completions", {**_LEAST["completions"], "structured_outputs": {kind: value}}, False)
    assert isinstance(older, GenerationRequest) and isinstance(newer, GenerationRequest)
    assert older.constraint is not None and newer.constraint is not None
    assert older.constraint == replace(newer.constraint, field=f"guided_{kind}")
    both = {f"guided_{kind}": value, "response_format": {"type": "json_object"}}
    refused = _outcome("completions", {**_LEAST["completions"], **both}, False)
    assert isinstance(refused, InvalidInput) and refused.field == f"guided_{kind}"


@pytest.mark.parametrize(
    "said", [{"enable_thinking": False}, {"thinking": {"type": "disabled", "budget_tokens": None}}]
)
def test_reasoning_is_switched_by_a_template_that_can(said: dict[str, Any]) -> None:
    (name,) = said
    switches = replace(_INFO, reasons=True, template_arguments=frozenset({"enable_thinking"}))
    request = OPENAI_CHAT.decode(PostedBody({**_LEAST["chat"], **said}), switches, streaming=False, request_id="r")
    assert request.prompts[0].template_kwargs == {"enable_thinking": False}  # type: ignore[union-attr]
    assert isinstance(_outcome("chat", {**_LEAST["chat"], **said}, False), GenerationRequest)  # it never reasons
    with pytest.raises(InvalidInput) as refused:
        posted = PostedBody({**_LEAST["chat"], **said})
        OPENAI_CHAT.decode(posted, replace(_INFO, reasons=True), streaming=False, request_id="r")
    assert refused.value.field == name


def test_every_list_of_the_document_names_its_items() -> None:
    """Client generators skip a path if its body has a list without ``items``."""

    def lists(schema: Any) -> Iterator[Any]:
        if isinstance(schema, dict):
            kinds = schema.get("type")
            if kinds == "array" or (isinstance(kinds, list) and "array" in kinds):
                yield schema
        inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
        for each in inner:
            yield from lists(each)

    found = list(lists(openai_document()))
    assert found and all("items" in each for each in found)


def test_a_response_is_one_answer_whatever_the_settings_say_of_chats() -> None:
    info = replace(_INFO, default_sampling={"n": 3})
    posted = PostedBody({**_LEAST["responses"], "metadata": {"a": "b"}, "temperature": 0.5})
    request = OPENAI_RESPONSES.decode(posted, info, streaming=False, request_id="r")
    assert request.sampling.n == 1
    assert (request.reply.repeated["metadata"], request.reply.repeated["temperature"]) == ({"a": "b"}, 0.5)


def test_the_page_has_a_row_for_every_parameter_of_a_response_and_no_other() -> None:
    said = _of_every_body()
    for names, done, _ in markdown.table("docs/openai.md", "Parameters of a response"):
        said.update(dict.fromkeys(markdown.code_spans(names), done))
    assert said == {name: treatment(field) for name, field in fields(ModelResponseRequest).items()}


def test_the_page_has_a_row_for_every_parameter_and_no_other() -> None:
    bodies = {"chat": fields(ChatCompletionRequest), "completions": fields(CompletionRequest)}
    said = {endpoint: _of_every_body() for endpoint in bodies}
    for names, endpoints, done, *_ in markdown.table("docs/openai.md", "Parameters"):
        for endpoint, body in bodies.items():
            for name in markdown.code_spans(names):
                if endpoints in ("both", endpoint) or (endpoints == "each" and name in body):
                    assert name not in said[endpoint], f"{name}: {endpoint}"
                    said[endpoint][name] = done
    assert said == {
        endpoint: {name: treatment(field) for name, field in body.items()} for endpoint, body in bodies.items()
    }


def _of_every_body() -> dict[str, str]:
    rows = markdown.table("docs/openai.md", "Parameters of other servers")
    return {name: done for names, done, _ in rows for name in markdown.code_spans(names)}
