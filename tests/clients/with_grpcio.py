"""Features of grpcio with a server that speaks the V2 protocol in MLServer's framing, with MLServer's own stubs.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
from features import NOT_IMPLEMENTED, QUESTION, check_freed, check_refused, feature, main
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

_PLAIN: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": "0.8", "seed": 5}
_TIMEOUT_S = 60
_KINDS = {bool: "bool_param", int: "int64_param", str: "string_param"}


def _request(name: str = "text_input", value: str = "Hello", *, model: str = "tiny", **parameters: Any) -> Any:
    request = pb.ModelInferRequest(model_name=model, id="mine")
    tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(value.encode())
    for key, each in {**_PLAIN, **parameters}.items():
        setattr(request.parameters[key], _KINDS[type(each)], each)
    return request


def _talk(**parameters: Any) -> Any:
    return _request("messages", json.dumps(QUESTION), **parameters)


def _infer(target: str, request: Any) -> dict[str, list[Any]]:
    with grpc.insecure_channel(target) as channel:
        return _outputs(Stub(channel).ModelInfer(request, timeout=_TIMEOUT_S))


def _outputs(response: Any) -> dict[str, list[Any]]:
    return {
        tensor.name: [
            each.decode() if isinstance(each, bytes) else each
            for each in [*tensor.contents.bytes_contents, *tensor.contents.uint_contents]
        ]
        for tensor in response.outputs
    }


def _stream(target: str, *requests: Any) -> list[Any]:
    with grpc.insecure_channel(target) as channel:
        return list(Stub(channel).ModelStreamInfer(iter(requests), timeout=_TIMEOUT_S))


def _joined(responses: list[Any]) -> str:
    assert responses[-1].parameters["triton_final_response"].bool_param
    return "".join(_outputs(response)["text_output"][0] for response in responses)


@feature("models")
def models(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        stub = Stub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert stub.ModelReady(pb.ModelReadyRequest(name="tiny")).ready
        assert "text_input" in [each.name for each in stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny")).inputs]
        index = {model.name: model.state for model in stub.RepositoryIndex(pb.RepositoryIndexRequest()).models}
        assert index["tiny"].endswith("READY"), index


@feature("chat")
def chat(target: str) -> None:
    found = _infer(target, _talk())
    assert found["text_output"][0] and found["num_output_tokens"] == [12] and found["finish_reason"] == ["length"]


@feature("chat, streamed")
def chat_streamed(target: str) -> None:
    assert [_joined(_stream(target, _talk()))] == _infer(target, _talk())["text_output"]


@feature("prompts")
def prompts(target: str) -> None:
    assert _infer(target, _request())["text_output"][0]


@feature("prompts, streamed")
def prompts_streamed(target: str) -> None:
    """Sends several messages on one stream: each is a separate request, and a bad one fails without the others."""
    (whole,) = _infer(target, _request())["text_output"]
    assert _joined(_stream(target, _request())) == whole
    responses = _stream(target, _request(), _request(max_tokens=0), _request())
    of = [[each for each in responses if each.parameters["request_index"].int64_param == n] for n in range(3)]
    assert _joined(of[0]) == _joined(of[2]) == whole
    assert "max_tokens" in of[1][0].parameters["error"].string_param


@feature("log-probabilities")
def logprobs(target: str) -> None:
    (found,) = _infer(target, _request(return_logprobs=True, top_logprobs=2))["logprobs"]
    assert len(json.loads(found)) == 12 and all(len(entry["top"]) == 2 for entry in json.loads(found))


@feature("parameters")
def parameters(target: str) -> None:
    request = _request(top_k=40, min_p="0.01", n=2, stop='["zz"]')
    request.outputs.add(name="text_output")
    found = _infer(target, request)
    assert list(found) == ["text_output"] and len(found["text_output"]) == 2
    raw = pb.ModelInferRequest(model_name="tiny", raw_input_contents=[b"\x05\0\0\0Hello"])
    raw.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    for key, each in _request().parameters.items():
        raw.parameters[key].CopyFrom(each)
    with grpc.insecure_channel(target) as channel:
        assert Stub(channel).ModelInfer(raw, timeout=_TIMEOUT_S).outputs


@feature("asyncio")
def asynchronous(target: str) -> None:
    async def ask() -> str:
        async with grpc.aio.insecure_channel(target) as channel:
            call = Stub(channel).ModelStreamInfer(iter([_request()]), timeout=_TIMEOUT_S)
            return _joined([response async for response in call])

    assert [asyncio.run(ask())] == _infer(target, _request())["text_output"]


def _refused(target: str, request: Any, code: Any, said: str) -> None:
    for call in (_infer, _stream):
        error = check_refused(lambda call=call: call(target, request), grpc.RpcError)
        assert error.code() is code and said in error.details(), error


@feature("errors")
def errors(target: str) -> None:
    _refused(target, _request(max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: ")
    _refused(target, _request(model="nobody"), grpc.StatusCode.NOT_FOUND, "nobody")


@feature("errors in a stream")
def errors_in_a_stream(target: str) -> None:
    """When its time is over, a stream ends with that reason and the text so far."""
    responses = _stream(target, _request(max_tokens=900, timeout=1_500_000))
    assert _joined(responses) and _outputs(responses[-1])["finish_reason"] == ["timeout"]


@feature("leaving")
def leaving(target: str) -> None:
    def leave() -> None:
        with grpc.insecure_channel(target) as channel:
            call = Stub(channel).ModelStreamInfer(iter([_request(max_tokens=900)]), timeout=_TIMEOUT_S)
            next(call)
            call.cancel()

    check_freed(leave)


@feature("tools, schemas, images")
def what_is_not_implemented(target: str) -> None:
    for name, value in NOT_IMPLEMENTED.items():
        _refused(target, _talk(**{name: json.dumps(value)}), grpc.StatusCode.INVALID_ARGUMENT, name)


main("grpcio", "grpc")
