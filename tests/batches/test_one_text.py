"""One prompt and one seed give the same text over every API and port, streamed, whole or in a batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests import plain_http
from tests.batches.api import Api
from tests.server import triton_wire, v2
from tests.server.harness import Server
from tests.server.openai import CHAT, TEXT, joined, prompt, stream, talk, texts, whole
from tests.server.seldon_proxy import seldon_proxy

_PROMPT, _SAID = "The model says", "Grüße"
_V2 = "/v2/models/tiny"
_Texts = dict[str, str]

_SAMPLINGS = pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 0}, marks=pytest.mark.slow),
        {"temperature": 1.3, "seed": 11, "top_k": 30, "min_p": 0.01},
    ],
)


@pytest.fixture(scope="module")
def proxy(batch_server: Server) -> Iterator[str]:
    with seldon_proxy(batch_server) as url:
        yield url


def _asked(sampling: dict[str, Any]) -> dict[str, Any]:
    return {**sampling, "max_tokens": 16, "ignore_eos": True, "stop": ["e"]}


def _of_openai(server: Server, path: str, body: dict[str, Any]) -> _Texts:
    return {"OpenAI": texts(whole(server, path, body))[0], "OpenAI streamed": joined(stream(server, path, body))[0]}


def _of_rest(url: str, body: dict[str, Any]) -> _Texts:
    found = {f"V2 {path}": v2.rest_unary(url, f"{_V2}/{path}", body).text for path in ("infer", "generate")}
    for path in ("infer_stream", "generate_stream"):
        found[f"V2 {path}"] = v2.joined(v2.rest_stream(url, f"{_V2}/{path}", body))
    return found


def _of_generate(url: str, asked: dict[str, Any]) -> _Texts:
    body = {"text_input": _PROMPT, **asked}
    answer = plain_http.post(f"{url}{_V2}/generate", json=body, timeout=v2.TIMEOUT_S).json()
    events = v2.EventParser().feed(
        plain_http.post(f"{url}{_V2}/generate_stream", json=body, timeout=v2.TIMEOUT_S).content
    )
    return {
        "generate": answer["text_output"],
        "generate streamed": "".join(json.loads(event)["text_output"] for event in events),
    }


def _of_grpc(server: Server, name: str, value: str, asked: dict[str, Any]) -> _Texts:
    """Returns the texts of both gRPC ports. Parameters other than integers and booleans are sent as strings."""
    parameters = {
        key: each if isinstance(each, int) else str(each) if isinstance(each, float) else json.dumps(each)
        for key, each in asked.items()
    }
    request = v2.grpc_request("tiny", **parameters)
    tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(value.encode())
    with grpc.insecure_channel(server.grpc_target) as channel, grpc.insecure_channel(server.triton_target) as triton:
        return {**_of_mlserver(GRPCInferenceServiceStub(channel), request), **_of_triton(triton, request)}


def _of_mlserver(stub: GRPCInferenceServiceStub, request: pb.ModelInferRequest) -> _Texts:
    replies = [v2.grpc_reply(each) for each in stub.ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S)]
    unary = v2.grpc_reply(stub.ModelInfer(request, timeout=v2.TIMEOUT_S))
    return {"gRPC": unary.text, "gRPC streamed": v2.joined(replies)}


def _of_triton(channel: grpc.Channel, request: pb.ModelInferRequest) -> _Texts:
    replies = triton_wire.replies(channel, request)
    assert not any(each.error for each in replies)
    return {
        "Triton": triton_wire.infer(channel, request).text,
        "Triton streamed": v2.joined(each.reply for each in replies),
    }


def _of_seldon(server: Server, proxy: str, body: dict[str, Any]) -> _Texts:
    """Returns the texts through the proxy, and those for the same tensors sent without the proxy."""
    answer = plain_http.post(f"{proxy}{_V2}/infer{CHAT.removeprefix('/v1')}", json=body, timeout=v2.TIMEOUT_S).json()
    events = v2.EventParser().feed(
        plain_http.post(
            f"{proxy}{_V2}/infer_stream{CHAT.removeprefix('/v1')}", json={**body, "stream": True}, timeout=v2.TIMEOUT_S
        ).content
    )
    columns = {"role": "user", "content": body["messages"][0]["content"], "type": "text"}
    tensors = [v2.bytes_tensor(name, value) for name, value in columns.items()]
    asked = {key: value for key, value in body.items() if key not in ("model", "messages")}
    reply = v2.rest_unary(server.url, f"{_V2}/infer", v2.rest_body(inputs=tensors, llm_parameters=asked))
    return {
        "Seldon": texts(answer)[0],
        "Seldon streamed": joined([json.loads(event) for event in events if event != "[DONE]"])[0],
        "Seldon's tensors": reply.text,
        "output_all": texts(json.loads(reply.outputs["output_all"][0]))[0],
    }


def _of_a_batch(api: Api, path: str, body: dict[str, Any]) -> _Texts:
    line = {"custom_id": "one", "method": "POST", "url": path, "body": body}
    batch = api.wait(api.create([line], endpoint=path)["id"])
    [answered] = api.lines(batch["output_file_id"])
    return {"batch": texts(answered["response"]["body"])[0]}


def _assert_one(found: _Texts) -> None:
    assert len(set(found.values())) == 1 and all(found.values()), found


@pytest.mark.long
@_SAMPLINGS
def test_a_prompt_has_one_text_in_all_spellings(batch_server: Server, api: Api, sampling: dict[str, Any]) -> None:
    asked = _asked(sampling)
    _assert_one(
        {
            **_of_openai(batch_server, TEXT, prompt(_PROMPT, **asked)),
            **_of_rest(batch_server.url, v2.rest_body(_PROMPT, **asked)),
            **_of_generate(batch_server.url, asked),
            **_of_grpc(batch_server, "text_input", _PROMPT, asked),
            **_of_a_batch(api, TEXT, prompt(_PROMPT, **asked)),
        }
    )


@pytest.mark.long
@_SAMPLINGS
def test_a_conversation_has_one_text_in_all_spellings(
    batch_server: Server, proxy: str, api: Api, sampling: dict[str, Any]
) -> None:
    asked = _asked(sampling)
    body = talk(_SAID, **asked)
    messages = json.dumps(body["messages"])
    _assert_one(
        {
            **_of_openai(batch_server, CHAT, body),
            **_of_rest(batch_server.url, v2.rest_body(inputs=[v2.bytes_tensor("messages", messages)], **asked)),
            **_of_grpc(batch_server, "messages", messages, asked),
            **_of_seldon(batch_server, proxy, body),
            **_of_a_batch(api, CHAT, body),
        }
    )
