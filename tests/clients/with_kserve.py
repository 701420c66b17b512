"""KServe's own clients of the V2 protocol against a real server, with JSON and raw bytes.

Knows nothing of this package: it runs where only the client is installed. Prints ``done`` if all that it asks for
holds.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, InferResponse, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

_ALL = ["text_output", "finish_reason", "num_input_tokens", "num_output_tokens"]


def _request(*, raw: bool, model: str = "tiny", outputs: Any = None, **parameters: Any) -> InferRequest:
    prompt = InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array(["Grüße"], dtype=object), binary_data=raw)
    given = {"max_tokens": 5, "ignore_eos": True, **parameters}
    return InferRequest(
        model_name=model, infer_inputs=[prompt], request_id="mine", parameters=given, request_outputs=outputs
    )


def _output(name: str, raw: bool) -> RequestedOutput:
    return RequestedOutput(name, {"binary_data": raw})


def _values(response: InferResponse) -> dict[str, Any]:
    assert response.id == "mine" and response.model_name == "tiny"
    return {output.name: [_text(value) for value in output.as_numpy().tolist()] for output in response.outputs}


def _text(value: Any) -> Any:
    """Strings that are no raw contents stay bytes over gRPC."""
    return value.decode() if isinstance(value, bytes) else value


def _check(values: dict[str, Any], text: str) -> None:
    """``text``: the expected answer; empty: any."""
    assert list(values) == _ALL, values
    assert values["num_output_tokens"] == [5] and values["finish_reason"] == ["length"], values
    assert values["text_output"] == [text] if text else values["text_output"][0], values


async def over_rest(url: str) -> str:
    """The text of the answer."""
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(url) and await client.is_server_ready(url)
    assert await client.is_model_ready(url, "tiny") and not await client.is_model_ready(url, "nobody")

    async def infer(request: InferRequest) -> dict[str, Any]:
        return _values(await client.infer(url, request, model_name=request.model_name))

    plain = await infer(_request(raw=False))
    text = str(plain["text_output"][0])
    _check(plain, "")
    _check(await infer(_request(raw=True)), text)
    _check(await infer(_request(raw=True, binary_data_output=True)), text)
    for raw in (True, False):
        chosen = [_output("text_output", raw), _output("num_output_tokens", True)]
        found = await infer(_request(raw=raw, outputs=chosen))
        assert found == {"text_output": [text], "num_output_tokens": [5]}, found
    for request, status, said in (
        (_request(raw=False, max_tokens=0), 422, "max_tokens: "),
        (_request(raw=True, model="nobody"), 404, "nobody not found"),
    ):
        try:
            await infer(request)
        except httpx.HTTPStatusError as error:
            assert error.response.status_code == status and said in str(error), error
        else:
            raise AssertionError(f"{said}: not refused")
    await client.close()
    return text


async def over_grpc(target: str, text: str) -> None:
    client = InferenceGRPCClient(target)
    assert await client.is_server_live() and await client.is_server_ready() and await client.is_model_ready("tiny")
    for raw in (False, True):
        _check(_values(await client.infer(_request(raw=raw))), text)
    for request, code, said in (
        (_request(raw=False, max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: "),
        (_request(raw=True, model="nobody"), grpc.StatusCode.NOT_FOUND, "nobody"),
    ):
        try:
            await client.infer(request)
        except grpc.RpcError as error:
            assert error.code() is code and said in error.details(), error
        else:
            raise AssertionError(f"{said}: not refused")
    await client.close()


async def main(url: str, *targets: str) -> None:
    text = await over_rest(url)
    for target in targets:
        await over_grpc(target, text)


asyncio.run(main(*sys.argv[1:]))
print("done")
