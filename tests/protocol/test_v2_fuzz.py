"""Any request is either understood or refused with status 422."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlserver.types import InferenceRequest
from pydantic import ValidationError

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.generate import FLAT
from mlserver_torch_stream.protocol.parameters import PARAMETERS
from mlserver_torch_stream.protocol.spelling import PostedBody
from mlserver_torch_stream.protocol.v2_names import INPUT_TENSORS, MESSAGE_TENSORS, PROMPT_TENSORS
from mlserver_torch_stream.protocol.v2_request import decode_request
from mlserver_torch_stream.types import GenerationRequest, ModelInfo
from tests.examples import examples

INFO = ModelInfo(
    vocab_size=100,
    max_model_len=64,
    max_num_seqs=4,
    has_chat_template=True,
    tool_parser="hermes",
    template_arguments=frozenset({"tools"}),
)

any_text = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(
    [
        "[]",
        "[1]",
        '["a"]',
        "{}",
        '{"n": 2}',
        '[{"role": "user", "content": "x"}]',
        "true",
        "1",
        "0.5",
        "text",
        "auto",
        "none",
        "prompt",
    ]
)
scalar = st.none() | st.booleans() | st.integers() | st.floats() | any_text
json_value = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3), max_leaves=6
)
PARAMETER_NAMES = sorted({spelling for each in PARAMETERS for spelling in (each.name, *each.aliases)})
key = st.sampled_from([*PARAMETER_NAMES, "content_typ"])
options = st.dictionaries(key, json_value, max_size=4)
parameters = st.dictionaries(
    key | st.sampled_from(["sampling_parameters", "llm_parameters", "kwargs"]), json_value | options, max_size=4
)
datatype = st.sampled_from(["BYTES", "INT64", "INT32", "FP32", "BOOL"])
tensor = st.fixed_dictionaries(
    {
        "name": st.sampled_from(sorted(INPUT_TENSORS)) | any_text,
        "datatype": datatype,
        "shape": st.just([1]) | st.lists(st.integers(-1, 3), max_size=3),
        "data": json_value | st.lists(scalar, min_size=1, max_size=3),
    }
)
prompt = st.just({"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]})


def outcome(body: dict[str, Any], streaming: bool) -> GenerationRequest | InvalidInput | None:
    try:
        payload = InferenceRequest.model_validate(body)
    except ValidationError:
        return None  # MLServer refuses it before we see it
    try:
        return decode_request(payload, INFO, streaming=streaming, request_id="r")
    except InvalidInput as refusal:
        refusal.message.encode()
        return refusal


@examples(300)
@given(parameters=parameters, streaming=st.booleans())
def test_any_parameters_are_understood_or_refused(parameters: dict[str, Any], streaming: bool) -> None:
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    outcome({**body, "parameters": parameters}, streaming)


@examples(300)
@given(inputs=st.lists(tensor | prompt, max_size=4), streaming=st.booleans())
def test_any_tensors_are_understood_or_refused(inputs: list[dict[str, Any]], streaming: bool) -> None:
    outcome({"inputs": inputs}, streaming)


_HELLO = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}


def _names(refusal: InvalidInput, field: str) -> bool:
    return refusal.field.partition(".")[0].partition("[")[0] == field


_EXAMPLES = pytest.mark.parametrize("examples", [8, pytest.param(300, marks=pytest.mark.slow)])


@_EXAMPLES
@pytest.mark.parametrize("name", PARAMETER_NAMES)
def test_a_bad_value_of_any_parameter_is_refused_by_its_name(name: str, examples: int) -> None:
    """The value is sent as a parameter, in ``sampling_parameters``, and in a flat body of the generate extension."""

    @settings(max_examples=examples, deadline=None)
    @given(value=json_value, streaming=st.booleans())
    def check(value: Any, streaming: bool) -> None:
        for found in (
            outcome({**_HELLO, "parameters": {name: value}}, streaming),
            outcome({**_HELLO, "parameters": {"sampling_parameters": {name: value}}}, streaming),
            _flat({"text_input": "x", name: value}, streaming),
            _flat({"text_input": "x", "parameters": {name: value}}, streaming),
        ):
            assert not isinstance(found, InvalidInput) or _names(found, name), (found.field, found.message)

    check()


def _flat(body: dict[str, Any], streaming: bool) -> GenerationRequest | InvalidInput:
    try:
        return FLAT.decode(PostedBody(body), INFO, streaming=streaming, request_id="r")
    except InvalidInput as refusal:
        refusal.message.encode()
        return refusal


@examples(200)
@given(
    body=st.dictionaries(st.sampled_from(["id", "parameters", "details", *PARAMETER_NAMES]) | any_text, json_value),
    text=json_value | any_text,
    streaming=st.booleans(),
)
def test_any_flat_body_is_understood_or_refused(body: dict[str, Any], text: Any, streaming: bool) -> None:
    _flat({**body, "text_input": text}, streaming)


@_EXAMPLES
@pytest.mark.parametrize("name", sorted(INPUT_TENSORS))
def test_any_contents_of_any_tensor_are_understood_or_refused_by_its_name(name: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(tensor=tensor, streaming=st.booleans())
    def check(tensor: dict[str, Any], streaming: bool) -> None:
        prompts = [] if name in PROMPT_TENSORS else _HELLO["inputs"]
        found = outcome({"inputs": [*prompts, {**tensor, "name": name}]}, streaming)
        if isinstance(found, InvalidInput) and found.field == "role" and name in MESSAGE_TENSORS:
            assert name in found.message  # it lacks the tensor that says how many messages there are
            return
        assert not isinstance(found, InvalidInput) or _names(found, name), (found.field, found.message)

    check()


@examples(200)
@given(
    outputs=st.lists(st.fixed_dictionaries({"name": any_text}, optional={"parameters": parameters}), max_size=3),
    id=any_text,
    streaming=st.booleans(),
)
def test_any_id_and_outputs_are_understood_or_refused(outputs: list[Any], id: str, streaming: bool) -> None:
    outcome({**_HELLO, "id": id, "outputs": outputs}, streaming)


def test_the_fuzz_can_reach_a_request() -> None:
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    assert isinstance(outcome(body, False), GenerationRequest)
