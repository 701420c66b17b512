"""Anything sent by OpenAI clients through Seldon's translator is understood, or refused by its field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.bodies import fields, treatment
from mlserver_torch_stream.protocol.openai_models import ChatCompletionRequest
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.protocol.parameters import PARAMETERS
from mlserver_torch_stream.protocol.seldon_spelling import SELDON
from mlserver_torch_stream.protocol.spelling import PostedBody
from mlserver_torch_stream.protocol.v2_names import INPUT_TENSORS, MESSAGE_TENSORS
from mlserver_torch_stream.protocol.values import printable
from mlserver_torch_stream.types import ChatPrompt, GenerationRequest
from tests.examples import examples
from tests.protocol.seldon_translator import NOT_PARAMETERS, Untranslatable, v2_request
from tests.protocol.test_v2_fuzz import INFO, any_text, json_value, scalar

_PATH = "/v2/models/chat_3/infer"
_HELLO = [{"role": "user", "content": "Hello"}]
FIELDS = [
    spelling
    for parameter in PARAMETERS
    for spelling in (parameter.name, *parameter.aliases)
    if spelling not in NOT_PARAMETERS
]
# What OpenAI's chat completions know beside these; a server's path has the version of the model.
_OPENAIS = {
    name: each for name, each in fields(ChatCompletionRequest).items() if name not in (*NOT_PARAMETERS, "model_version")
}
FIELDS += [name for name in _OPENAIS if name not in FIELDS]
FIELDS += ["best_of", "guided_json"]


def _decode(body: dict[str, Any], streaming: bool) -> GenerationRequest | InvalidInput:
    """Decodes a body as a server does that gets it from the translator. Raises Untranslatable."""
    sent = v2_request(_PATH, json.dumps({"model": "chat", **body}).encode())
    try:
        return SELDON.decode(PostedBody(sent), INFO, streaming=streaming, request_id="r")
    except InvalidInput as refusal:
        return refusal


def _param(refusal: InvalidInput) -> str:
    """Returns the field that the error names for the client."""
    _, body = SELDON.refusal(refusal)
    error = json.loads(body["outputs"][0]["data"][0])["error"]
    assert error["message"].startswith(f"{error['param']}: ")
    return str(error["param"]).partition(".")[0].partition("[")[0]


# --- conversations ---

plain = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
role = st.text("aZ0_.-", min_size=1, max_size=64)
text_part = st.fixed_dictionaries({"type": st.just("text"), "text": plain})
call = st.fixed_dictionaries({"id": plain, "function": st.dictionaries(plain, plain, max_size=2)})
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | role},
    optional={
        "content": st.none() | plain | st.lists(text_part, max_size=3),
        "tool_calls": st.lists(call, max_size=2),
        "tool_call_id": plain,
    },
)


def _expected(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message that the chat template must get."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    kept = {key: message[key] for key in ("tool_calls", "tool_call_id") if message.get(key)}
    return {"role": message["role"], "content": text, **kept}


@examples(300)
@given(messages=st.lists(message, min_size=1, max_size=4))
def test_a_conversation_survives_the_translator(messages: list[dict[str, Any]]) -> None:
    request = _decode({"messages": messages}, False)
    assert isinstance(request, GenerationRequest), request
    [prompt] = request.prompts
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == [_expected(each) for each in messages]


@examples(300)
@given(
    messages=json_value | st.lists(message | st.dictionaries(st.sampled_from(["role", "content", "type"]), json_value))
)
def test_any_messages_are_understood_or_refused_as_messages(messages: Any) -> None:
    try:
        outcome = _decode({"messages": messages}, False)
    except Untranslatable:
        return  # the proxy refuses them
    assert isinstance(outcome, GenerationRequest) or _param(outcome) == "messages"


@examples(200)
@given(
    tools=json_value | st.lists(json_value),
    more=st.dictionaries(st.sampled_from(["tool_choice", "parallel_tool_calls"]), json_value),
)
def test_any_tools_are_understood_or_refused_by_name(tools: Any, more: dict[str, Any]) -> None:
    outcome = _decode({"messages": _HELLO, "tools": tools, **more}, False)
    assert isinstance(outcome, GenerationRequest) or _param(outcome) in ("tools", *more)


# --- parameters ---


@pytest.mark.parametrize("field", FIELDS)
def test_a_bad_value_of_any_field_is_refused_by_its_name(field: str) -> None:
    @examples(40, fast=8)
    @given(value=json_value, streaming=st.booleans())
    def check(value: Any, streaming: bool) -> None:
        outcome = _decode({"messages": _HELLO, field: value}, streaming)
        assert isinstance(outcome, GenerationRequest) or _param(outcome) == field

    check()


_SAMPLES = (
    "x",
    True,
    {},
    1,
    [],
    [{"type": "function", "function": {"name": "f"}}],
    {"type": "text"},
    "auto",
    "none",
    {"o": 1},
    ["one", "two"],
    {"type": "disabled"},
)


@pytest.mark.parametrize("name", _OPENAIS)
def test_what_openais_endpoint_does_with_a_parameter_is_done_here_too(name: str) -> None:
    taken = 0
    for value in (*_SAMPLES, *(each for kind in _OPENAIS[name].metadata for each in getattr(kind, "harmless", ()))):
        body = {"messages": _HELLO, **({"logprobs": True} if name == "top_logprobs" else {}), name: value}
        try:
            OPENAI_CHAT.decode(PostedBody({"model": "chat", **body}), INFO, streaming=True, request_id="r")
        except InvalidInput:
            if treatment(_OPENAIS[name]) == "refused":
                outcome = _decode(body, True)
                assert isinstance(outcome, InvalidInput) and outcome.field == name, value
        else:
            taken += 1
            assert isinstance(_decode(body, True), GenerationRequest), value
    assert taken or treatment(_OPENAIS[name]) == "refused"


@examples(300)
@given(body=st.dictionaries(st.sampled_from(FIELDS) | any_text, json_value, max_size=5), streaming=st.booleans())
def test_any_fields_together_are_understood_or_refused(body: dict[str, Any], streaming: bool) -> None:
    outcome = _decode({**body, "model": "chat", "messages": _HELLO}, streaming)
    if isinstance(outcome, InvalidInput):
        outcome.message.encode()
        _param(outcome)


# --- tensors, by whoever makes them ---

tensor = st.fixed_dictionaries(
    {
        "name": st.sampled_from(MESSAGE_TENSORS),
        "datatype": st.sampled_from(["BYTES", "BYTES", "BYTES", "INT64", "BOOL"]),
        "shape": st.just([1]) | st.lists(st.integers(-1, 3), max_size=2),
        "data": json_value | st.lists(any_text | scalar, min_size=1, max_size=3),
    }
)


@examples(400)
@given(inputs=st.lists(tensor, min_size=1, max_size=5), parameters=st.dictionaries(any_text, json_value, max_size=2))
def test_any_tensors_of_a_conversation_are_understood_or_refused(
    inputs: list[dict[str, Any]], parameters: dict[str, Any]
) -> None:
    body = {"inputs": inputs, "parameters": parameters}
    assert SELDON.accepts(body)
    try:
        SELDON.decode(PostedBody(body), INFO, streaming=True, request_id="r")
    except InvalidInput as refusal:
        top = refusal.field.partition(".")[0]
        named = {printable(key) for key in parameters}
        assert top in {"inputs", "parameters", *INPUT_TENSORS, *named} or refusal.field in named
