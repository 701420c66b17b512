"""Tool calls and reasoning on a real server, over every API for conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from transformers import AutoTokenizer

from mlserver_torch_stream.client import Client
from mlserver_torch_stream.tool_calls import join_calls
from tests.server import triton_wire, v2
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve
from tests.server.openai import CHAT, post, refused, stream, talk, whole

_TOOLS = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{% for key in call.function.arguments %} {{ key }}{% endfor %}"
    "{% endfor %}{% endfor %}"
)
_REASONING = _TOOLS + "<|assistant|>{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}<think>\n{# </think> #}"
_CALLS = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_DECLARED = {
    "start_anchor": "<|assistant|>",
    "fields": {"thinking": {"open": "<think>", "close": "</think>"}, "tool_calls": _CALLS, "content": {}},
}
_LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["home", "work", "the end"]}, "far": {"type": "boolean"}},
            "required": ["at", "far"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
_GO = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "additionalProperties": False}}}
_BAD = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "nothing"}}}}
_ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
_NAMED = {"type": "function", "function": {"name": "look"}}
_ASKED: dict[str, Any] = {"tools": [_LOOK, _GO], "max_tokens": 200, "temperature": 1.0, "seed": 3}


def _declaring(model: Path, folder: Path) -> Path:
    """Writes the model's tokenizer with a declaration of how answers are parsed, and returns its folder."""
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "response_template": _DECLARED}))
    return folder


@pytest.fixture(scope="module")
def tools(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    declaring = _declaring(tiny_model, tmp_path_factory.mktemp("declaring"))
    models = [
        Model("tiny", str(tiny_model), extra={"chat_template": _TOOLS}),
        Model("thinks", str(tiny_model), extra={"chat_template": _REASONING}),
        Model("unknown", str(tiny_model)),
        Model("llama", str(tiny_model), extra={"tool_parser": "llama3"}),
        Model("declares", str(tiny_model), extra={"chat_template": _REASONING, "tokenizer": str(declaring)}),
    ]
    environment = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.003"}  # the arguments of a call are several events
    folder = tmp_path_factory.mktemp("tools")
    with serve(folder, models, settings=QUIET, environment=environment, triton=True) as server:
        yield server


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"at", "far"} and arguments["at"] in ("home", "work", "the end")
    return arguments


@pytest.mark.parametrize("model", ["tiny", "llama", "unknown"])
def test_a_forced_call_is_one_streamed_and_whole(tools: Server, model: str) -> None:
    asked = talk(**_ASKED, model=model, tool_choice=_NAMED)
    (choice,) = whole(tools, CHAT, asked)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "look" and call["id"].startswith("call_")
    _arguments(call)
    chunks = [chunk["choices"][0] for chunk in stream(tools, CHAT, asked)]
    deltas = [delta for chunk in chunks for delta in chunk["delta"].get("tool_calls", ())]
    first, *others = deltas
    assert first["index"] == 0 and first["id"] and first["type"] == "function" and first["function"]["name"] == "look"
    assert others and all(delta.keys() == {"index", "function"} for delta in others)
    joined = "".join(delta["function"]["arguments"] for delta in deltas)
    assert joined == call["function"]["arguments"]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert not any(chunk["delta"].get("content") for chunk in chunks)


def test_a_required_call_is_of_any_function_and_ends_without_parallel_ones(tools: Server) -> None:
    asked = {**_ASKED, "tool_choice": "required", "parallel_tool_calls": False, "n": 4}
    choices = whole(tools, CHAT, talk(**asked))["choices"]
    for choice in choices:
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert call["function"]["name"] in ("look", "go")
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 4


def test_a_conversation_of_three_turns_reaches_the_template(tools: Server) -> None:
    """The template gets the arguments as an object, the tool's answer, and the reasoning of the previous turn."""
    answer = whole(tools, CHAT, talk(**_ASKED, tool_choice=_NAMED))["choices"][0]["message"]
    messages = [
        {"role": "user", "content": "Where?"},
        {**answer, "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "at home"},
    ]
    once = whole(tools, CHAT, talk(messages=messages, max_tokens=4))
    by_hand = "<|user|>Where?<|assistant|>(Hm.)<tool_call>look at far<|tool|>at home"
    said = whole(tools, "/v1/completions", {"model": "tiny", "prompt": by_hand, "max_tokens": 4})
    assert once["choices"][0]["message"]["content"] == said["choices"][0]["text"]
    assert once["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"]
    broken = [{**answer, "tool_calls": [{**answer["tool_calls"][0], "function": {"name": "f", "arguments": "{"}}]}]
    error = refused(post(tools, CHAT, talk(messages=[*messages[:1], *broken])))
    assert error["param"] == "messages" and "arguments of call 0 of message 1" in error["message"]


def test_without_a_choice_the_answer_may_be_text(tools: Server) -> None:
    free = {**_ASKED, "tools": [_GO], "max_tokens": 12, "ignore_eos": True}
    choice = whole(tools, CHAT, talk(**free))["choices"][0]
    assert "tool_calls" not in choice["message"] and choice["message"]["content"]
    hidden = whole(tools, CHAT, talk(**free, tool_choice="none"))
    bare = whole(tools, CHAT, talk(**{**free, "tools": []}))
    assert hidden["usage"]["prompt_tokens"] == bare["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [_LOOK, _LOOK]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [_LOOK], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [_LOOK], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"tools": [_GO], "tool_choice": _NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"model": "unknown", "tools": [_LOOK]}, "tools"),
        ({"model": "llama", "tools": [_GO]}, "tools"),
        ({"tools": [{"type": "function", "function": {**_BAD, "strict": True}}]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [_GO, {"type": "function", "function": {"name": "f", "parameters": _ENDLESS, "strict": True}}]},
            "tools[1].function.parameters",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"model": "thinks", "reasoning_effort": "much"}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused_by_name(tools: Server, more: dict[str, Any], param: str) -> None:
    response = post(tools, CHAT, talk(**more))
    assert response.status_code == 400
    assert refused(response)["param"] == param


@pytest.mark.parametrize("model", ["thinks", "declares"])
def test_reasoning_has_two_names_and_is_counted(tools: Server, model: str) -> None:
    """The prompt begins the reasoning, which a random model never ends."""
    asked = talk(model=model, max_tokens=12, ignore_eos=True, temperature=1.0, seed=1)
    answer = whole(tools, CHAT, asked)
    message = answer["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning"] == message["reasoning_content"] != ""
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(tools, CHAT, asked)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    longer = whole(tools, CHAT, {**asked, "reasoning_effort": "high"})
    assert longer["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"]


def test_v2_replies_have_tensors_of_calls_and_reasoning(tools: Server) -> None:
    messages = json.dumps([{"role": "user", "content": "Hello"}])
    inputs = [
        v2.bytes_tensor("messages", messages),
        v2.bytes_tensor("tools", json.dumps([_LOOK])),
        v2.bytes_tensor("tool_choice", json.dumps(_NAMED)),
    ]
    body = {"inputs": inputs, "parameters": {"max_tokens": 200}}
    reply = v2.rest_unary(tools.url, "/v2/models/tiny/infer", body)
    ((call,),) = (json.loads(each) for each in reply.outputs["tool_calls"])
    assert call["function"]["name"] == "look" and "reasoning" not in reply.outputs
    _arguments(call)
    assert reply.outputs["finish_reason"] == ["tool_calls"] and reply.outputs["text_output"] == [""]
    replies = v2.rest_stream(tools.url, "/v2/models/tiny/infer_stream", body)
    deltas = [delta for each in replies for text in each.outputs.get("tool_calls", ()) for delta in json.loads(text)]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    thinks = {"inputs": inputs[:1], "parameters": {"max_tokens": 8, "ignore_eos": True}}
    reply = v2.rest_unary(tools.url, "/v2/models/thinks/infer", thinks)
    assert reply.outputs["reasoning"][0] and reply.outputs["text_output"] == [""] and "tool_calls" not in reply.outputs
    asked = {**thinks, "outputs": [{"name": "tool_calls"}]}
    assert v2.rest_unary(tools.url, "/v2/models/thinks/infer", asked).outputs == {"tool_calls": ["[]"]}


_SELDONS = [v2.bytes_tensor(*each) for each in (("role", "user"), ("content", "Hello"), ("type", "text"))]


def test_seldons_chunks_have_the_calls_and_the_reasoning(tools: Server) -> None:
    inputs = [
        *_SELDONS,
        v2.bytes_tensor("tools", json.dumps(_LOOK)),
        v2.bytes_tensor("tool_choice", json.dumps(_NAMED)),
    ]
    reply = v2.rest_unary(tools.url, "/v2/models/tiny/infer", {"inputs": inputs, "parameters": {"max_tokens": 200}})
    (choice,) = json.loads(reply.outputs["output_all"][0])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    _arguments(choice["message"]["tool_calls"][0])
    deltas = _seldons_deltas(tools, "tiny", {"inputs": inputs, "parameters": {"max_tokens": 200}})
    streamed = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(streamed) == choice["message"]["tool_calls"][0]["function"]["arguments"]
    thinks = {"inputs": _SELDONS, "parameters": {"max_tokens": 8, "ignore_eos": True}}
    reply = v2.rest_unary(tools.url, "/v2/models/thinks/infer", thinks)
    message = json.loads(reply.outputs["output_all"][0])["choices"][0]["message"]
    assert message["reasoning"] and message["content"] == ""
    thoughts = [delta.get("reasoning", "") for delta in _seldons_deltas(tools, "thinks", thinks)]
    assert "".join(thoughts) == message["reasoning"]


def _seldons_deltas(server: Server, model: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    replies = v2.rest_stream(server.url, f"/v2/models/{model}/infer_stream", body)
    chunks = [json.loads(each.outputs["output_all"][0]) for each in replies]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_tritons_replies_have_tensors_of_calls_and_reasoning(tools: Server) -> None:
    messages = json.dumps([{"role": "user", "content": "Hello"}])

    def request(model: str, more: dict[str, str], **parameters: Any) -> pb.ModelInferRequest:
        made = v2.grpc_request(model, id="a", raw=True, **parameters)
        for name, text in {"messages": messages, **more}.items():
            made.inputs.add(name=name, datatype="BYTES", shape=[1])
            made.raw_input_contents.append(len(text.encode()).to_bytes(4, "little") + text.encode())
        return made

    called = request("tiny", {"tools": json.dumps([_LOOK]), "tool_choice": json.dumps(_NAMED)}, max_tokens=200)
    thinks = request("thinks", {}, max_tokens=8, ignore_eos=True)
    with grpc.insecure_channel(tools.triton_target) as channel:
        reply, thought = triton_wire.infer(channel, called), triton_wire.infer(channel, thinks)
        found, thoughts = triton_wire.replies(channel, called), triton_wire.replies(channel, thinks)
    ((call,),) = (json.loads(each) for each in reply.outputs["tool_calls"])
    _arguments(call)
    parts = [json.loads(text) for each in found for text in each.reply.outputs.get("tool_calls", ())]
    assert "".join(delta["function"]["arguments"] for part in parts for delta in part) == call["function"]["arguments"]
    (reasoning,) = thought.outputs["reasoning"]
    assert reasoning and reasoning == "".join(
        text for each in thoughts for text in each.reply.outputs.get("reasoning", ())
    )


@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_the_clients_deltas_have_calls_and_reasoning(tools: Server, transport: str) -> None:
    url = f"grpc://{tools.grpc_target}" if transport == "grpc" else tools.url
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "seed": 3, "temperature": 1.0}
    with Client(url) as client:
        deltas = list(client.stream("tiny", **asked, max_tokens=200, tools=[_LOOK], tool_choice=_NAMED))
        thoughts = list(client.stream("thinks", **asked, max_tokens=8, ignore_eos=True))
    (call,) = join_calls(part for delta in deltas for part in delta.tool_calls)
    assert call.name == "look" and call.id and json.loads(call.arguments).keys() == {"at", "far"}
    assert deltas[-1].finish_reason == "tool_calls" and not any(delta.text for delta in deltas)
    assert "".join(delta.reasoning for delta in thoughts) and not any(delta.text for delta in thoughts)
