"""The prompt sources of V2, over every transport."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.spelling import PostedBody
from mlserver_torch_stream.protocol.v2_reply import V2
from mlserver_torch_stream.protocol.v2_request import decode_request
from mlserver_torch_stream.tool_calls import ToolChoice
from mlserver_torch_stream.types import ChatPrompt, GenerationRequest, ModelInfo, TextPrompt, TokensPrompt
from tests.protocol.wire import T, Wire, over_grpc, over_rest, text

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé"}]


def decode(payload: InferenceRequest, info: ModelInfo, *, streaming: bool = False) -> GenerationRequest:
    return decode_request(payload, info, streaming=streaming, request_id="r1")


def conversation(request: GenerationRequest) -> ChatPrompt:
    [prompt] = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refused(payload: InferenceRequest, info: ModelInfo, *, streaming: bool = False) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        decode(payload, info, streaming=streaming)
    return caught.value


def raw_rest(**tensor: Any) -> InferenceRequest:
    return InferenceRequest.model_validate({"inputs": [{"name": "text_input", "datatype": "BYTES", **tensor}]})


@pytest.mark.parametrize("name", ["text_input", "prompt", "text_inputs", "inputs", "args", "array_inputs"])
def test_every_alias_of_the_text_prompt_is_the_same_prompt(wire: Wire, info: ModelInfo, name: str) -> None:
    request = decode(wire(text("naïve €", name=name)), info)
    assert request.prompts == (TextPrompt("naïve €"),)
    assert request.request_id == "r1"


@pytest.mark.parametrize("shape", [[2], [2, 1], [1, 2]])
def test_a_batch_keeps_its_order_whatever_its_shape(wire: Wire, info: ModelInfo, shape: list[int]) -> None:
    request = decode(wire(T("text_input", "BYTES", ["a", "b"], shape)), info)
    assert request.prompts == (TextPrompt("a"), TextPrompt("b"))


@pytest.mark.parametrize("datatype", ["INT64", "INT32"])
@pytest.mark.parametrize("shape", [[3], [1, 3]])
def test_token_ids_are_used_as_they_are(wire: Wire, info: ModelInfo, datatype: str, shape: list[int]) -> None:
    request = decode(wire(T("input_ids", datatype, [5, 0, 99], shape)), info)
    assert request.prompts == (TokensPrompt((5, 0, 99)),)


def test_ids_that_fill_the_context_are_refused_by_the_name_of_their_tensor(wire: Wire, info: ModelInfo) -> None:
    longest = info.max_model_len - 1
    assert decode(wire(T("input_ids", "INT64", [5] * longest, [longest])), info).prompts
    too_long = wire(T("input_ids", "INT64", [5] * info.max_model_len, [info.max_model_len]))
    assert refused(too_long, info).field == "input_ids"


_TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"inputs": [{}] * 1025}, "inputs"),
        ({"inputs": [_TENSOR], "outputs": [{}] * 1025}, "outputs"),
        ({"inputs": [_TENSOR], "parameters": {str(number): 1 for number in range(4097)}}, "parameters"),
        ({"inputs": [{"parameters": {str(number): 1 for number in range(5)}}] * 1000}, "parameters"),
        ({"inputs": [{**_TENSOR, "data": [["a"] * 5000], "shape": [1, 5000]}]}, "text_input"),
    ],
    ids=["inputs", "outputs", "parameters", "parameters of tensors", "elements"],
)
def test_tensors_and_parameters_are_counted_before_they_are_converted(
    info: ModelInfo, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput, match=rf"^{field}: must have at most \d+ (tensors|entries|elements)"):
        V2.decode(PostedBody(body), info, streaming=False, request_id="r")


def test_rest_may_nest_its_data_as_the_shape_says(info: ModelInfo) -> None:
    payload = over_rest(T("input_ids", "INT64", [[5, 6]], [1, 2]))
    assert decode(payload, info).prompts == (TokensPrompt((5, 6)),)


def test_base64_text_is_decoded(info: ModelInfo) -> None:
    encoded = base64.b64encode("zwölf".encode()).decode()
    payload = raw_rest(shape=[1], data=[encoded], parameters={"content_type": "base64"})
    assert decode(payload, info).prompts == (TextPrompt("zwölf"),)
    assert refused(raw_rest(shape=[1], data=["?"], parameters={"content_type": "base64"}), info).field == "text_input"


def test_messages_become_a_conversation(wire: Wire, info: ModelInfo) -> None:
    request = decode(wire(text(json.dumps(MESSAGES), name="messages")), info)
    assert request.prompts == (ChatPrompt(messages=tuple(MESSAGES)),)


def test_text_parts_are_joined_and_other_parts_refused_by_name(info: ModelInfo) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    payload = over_rest(text(json.dumps([{"role": "user", "content": parts}]), name="messages"))
    assert conversation(decode(payload, info)).messages[0]["content"] == "ab"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    payload = over_rest(text(json.dumps([{"role": "user", "content": image}]), name="messages"))
    assert "image_url" in refused(payload, info).message


def test_an_assistant_turn_may_hold_only_tool_calls(info: ModelInfo) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    payload = over_rest(text(json.dumps([*MESSAGES, turn]), name="messages"))
    last = conversation(decode(payload, info)).messages[-1]
    assert last["content"] == ""
    assert last["tool_calls"] == turn["tool_calls"]


@pytest.mark.parametrize(
    "messages",
    ["", "nonsense", "{}", "[]", "[3]", '[{"content": "x"}]', '[{"role": "user"}]', '[{"role": "", "content": "x"}]',
     '[{"role": "user", "content": 3}]', '[{"role": "user", "content": "x", "tool_calls": 3}]', "[" * 50_000,
     '[{"role": "user", "content": "\\ud800"}]'],
)  # fmt: skip
def test_broken_messages_are_refused_by_name(info: ModelInfo, messages: str) -> None:
    assert refused(over_rest(text(messages, name="messages")), info).field == "messages"


def test_tools_and_template_arguments_reach_the_conversation(wire: Wire, info: ModelInfo) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    payload = wire(
        text(json.dumps(MESSAGES), name="messages"),
        text(json.dumps(tool), name="tools"),
        parameters={"chat_template_kwargs": {"enable_thinking": False}},
    )
    prompt = decode(payload, info).prompts[0]
    assert prompt == ChatPrompt(tuple(MESSAGES), tools=(tool,), template_kwargs={"enable_thinking": False})


def test_a_client_cannot_replace_the_chat_template(info: ModelInfo) -> None:
    parameters = {"chat_template_kwargs": {"chat_template": "{{ messages }}"}}
    error = refused(over_rest(text(json.dumps(MESSAGES), name="messages"), parameters=parameters), info)
    assert error.field == "chat_template_kwargs"
    assert "chat_template" in error.message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"conversations": []}, "may not set conversations"),
        ({"self": 1}, "may not set self"),
        (dict.fromkeys(map(str, range(65))), "may have at most 64 entries, got 65"),
    ],
)
def test_template_arguments_that_are_not_the_templates_are_refused(
    info: ModelInfo, given: dict[str, Any], said: str
) -> None:
    parameters = {"chat_template_kwargs": given}
    error = refused(over_rest(text(json.dumps(MESSAGES), name="messages"), parameters=parameters), info)
    assert (error.field, said in error.message) == ("chat_template_kwargs", True), error.message


def test_the_choice_of_tools_reaches_the_conversation(info: ModelInfo) -> None:
    tool = json.dumps({"type": "function", "function": {"name": "f", "strict": True}})
    tensors = [text(json.dumps(MESSAGES), name="messages"), text(tool, name="tools")]
    assert conversation(decode(over_rest(*tensors, text("auto", name="tool_choice")), info)).tools is not None
    assert conversation(decode(over_rest(*tensors, text("none", name="tool_choice")), info)).tools is None
    named = text(json.dumps({"type": "function", "function": {"name": "f"}}), name="tool_choice")
    for more, choice in (
        ([text("required", name="tool_choice")], ToolChoice(required=True, strict=frozenset("f"))),
        ([named], ToolChoice(name="f", strict=frozenset("f"))),
        ([text("false", name="parallel_tool_calls")], ToolChoice(parallel=False, strict=frozenset("f"))),
    ):
        assert conversation(decode(over_rest(*tensors, *more), info)).tool_choice == choice
    other = text(json.dumps({"type": "function", "function": {"name": "g"}}), name="tool_choice")
    assert refused(over_rest(*tensors, other), info).field == "tool_choice"
    assert refused(over_rest(tensors[0], named), info).field == "tool_choice"  # without tools
    blind = replace(info, template_arguments=frozenset[str]())
    for unable in (replace(info, tool_parser=None), blind):
        assert refused(over_rest(*tensors), unable).field == "tools"
        assert conversation(decode(over_rest(*tensors, named), unable)).tool_choice.forced
    assert refused(over_rest(*tensors, named), replace(info, tool_parser="none")).field == "tool_choice"
    assert conversation(decode(over_rest(*tensors[:1]), replace(info, tool_parser=None))).tools is None


def test_a_text_prompt_takes_no_chat_options(info: ModelInfo) -> None:
    assert refused(over_rest(text("x"), text("{}", name="tools")), info).field == "tools"
    parameters = {"chat_template_kwargs": {"a": 1}}
    assert refused(over_rest(text("x"), parameters=parameters), info).field == "chat_template_kwargs"


def test_a_conversation_needs_a_chat_template(info: ModelInfo) -> None:
    bare = replace(info, has_chat_template=False)
    assert refused(over_rest(text(json.dumps(MESSAGES), name="messages")), bare).field == "messages"
    assert refused(over_rest(text("user", name="role"), text("hi", name="content")), bare).field == "role"


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ([], "text_input"),
        ([text("a"), text("b", name="prompt")], "prompt"),
        ([text("a"), T("input_ids", "INT64", [1])], "input_ids"),
        ([text("a"), text("user", name="role")], "role"),
        ([text("a"), text("b")], "text_input"),
        ([text("")], "text_input"),
        ([text("a", "")], "text_input"),
        ([T("text_input", "BYTES", ["a"], [2])], "text_input"),
        ([T("text_input", "BYTES", ["a", "b", "c", "d"], [2, 2])], "text_input"),
        ([T("text_input", "INT64", [1])], "text_input"),
        ([T("input_ids", "INT64", [1, 100])], "input_ids"),
        ([T("input_ids", "INT64", [-1])], "input_ids"),
        ([T("input_ids", "INT64", [1, 2], [2, 1])], "input_ids"),
        ([T("input_ids", "FP32", [1.0])], "input_ids"),
        ([T("input_ids", "UINT32", [1])], "input_ids"),
    ],
)
def test_the_wrong_prompt_tensor_is_named(wire: Wire, info: ModelInfo, tensors: list[T], field: str) -> None:
    assert refused(wire(*tensors), info).field == field


def test_an_id_outside_the_vocabulary_is_named_with_its_position(info: ModelInfo) -> None:
    message = refused(over_rest(T("input_ids", "INT64", [1, 2, 100])), info).message
    assert "100 at position 2" in message


def test_an_unknown_tensor_is_named_with_its_nearest_neighbour(wire: Wire, info: ModelInfo) -> None:
    error = refused(wire(text("a", name="text_imput")), info)
    assert error.field == "text_imput"
    assert "did you mean text_input?" in error.message


def test_bytes_that_are_not_utf8_are_refused_by_tensor_name(info: ModelInfo) -> None:
    assert "UTF-8" in refused(over_grpc(T("text_input", "BYTES", [b"\xff"])), info).message


def test_empty_prompts_are_refused_in_rest_where_no_data_can_be_sent(info: ModelInfo) -> None:
    assert refused(over_rest(T("input_ids", "INT64", [])), info).field == "input_ids"
    assert refused(over_rest(T("text_input", "BYTES", [])), info).field == "text_input"


@pytest.mark.parametrize(
    "tensor",
    [
        {"shape": [1], "data": [3]},
        {"shape": [1], "data": [None]},
        {"shape": [1], "data": [["a"]]},
        {"shape": [2, 2], "data": [["a"], ["b", "c", "d"]]},
        {"shape": [-1], "data": ["a"]},
        {"shape": [1], "data": {"a": 1}},
        {"shape": [1], "data": ["\ud800"]},
        {"shape": [1], "data": ["a"], "parameters": {"shared_memory_region": "r"}},
    ],
)
def test_malformed_rest_tensors_are_invalid_input(info: ModelInfo, tensor: dict[str, Any]) -> None:
    refused(raw_rest(**tensor), info)


def test_a_tensor_keeps_to_its_datatype(info: ModelInfo) -> None:
    assert refused(over_rest(T("input_ids", "INT64", [True])), info).field == "input_ids"
    assert refused(over_rest(T("input_ids", "INT64", [1.5])), info).field == "input_ids"
    assert refused(over_rest(text("a"), T("stream", "BOOL", [1])), info).field == "stream"


def test_an_unknown_grpc_datatype_is_refused(info: ModelInfo) -> None:
    payload = over_grpc(text("a"))
    payload.inputs[0].datatype = "FP8"
    assert refused(payload, info).field == "text_input"


@pytest.mark.parametrize(
    "tensor",
    [
        {"shape": [2**62] * 400_000, "data": ["x"]},
        {"shape": [1_000_000], "data": ["x"] * 1_000_000},
        {"name": "input_ids", "datatype": "INT64", "shape": [1_000_000], "data": [1] * 1_000_000},
    ],
    ids=["dimensions", "prompts", "token ids"],
)
def test_what_is_far_too_large_is_refused_before_it_is_looked_at(info: ModelInfo, tensor: dict[str, Any]) -> None:
    payload = raw_rest(**tensor)
    begin = time.thread_time()
    assert "at most" in refused(payload, info).message
    assert time.thread_time() - begin < 0.5, "the event loop waits meanwhile"


@pytest.mark.parametrize(
    ("reads", "reasons", "effort", "arguments"),
    [
        ({"reasoning_effort", "enable_thinking"}, True, "low", {"reasoning_effort": "low"}),
        ({"reasoning_effort"}, True, "max", {"reasoning_effort": "max"}),
        ({"enable_thinking"}, True, "low", {"enable_thinking": True}),
        ({"enable_thinking"}, True, "none", {"enable_thinking": False}),
        (set(), False, "none", {}),
        (set(), True, "none", None),
        (set(), False, "high", None),
    ],
)
def test_the_reasoning_effort_goes_to_a_template_that_can_take_it(
    info: ModelInfo, reads: set[str], reasons: bool, effort: str, arguments: dict[str, Any] | None
) -> None:
    able = replace(info, template_arguments=frozenset(reads), reasons=reasons)
    payload = over_rest(text(json.dumps(MESSAGES), name="messages"), parameters={"reasoning_effort": effort})
    if arguments is None:
        assert refused(payload, able).field == "reasoning_effort"
    else:
        assert conversation(decode(payload, able)).template_kwargs == arguments


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_template_gets_the_reasoning_under_both_names(info: ModelInfo, name: str) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes.", name: "Hm."}]
    prompt = conversation(decode(over_rest(text(json.dumps(said), name="messages")), info))
    assert prompt.messages[1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
    }
    said[1][name] = 3  # type: ignore[assignment]
    assert refused(over_rest(text(json.dumps(said), name="messages")), info).field == "messages"
