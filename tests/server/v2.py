"""Makes V2 requests and reads their replies, over REST and gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlserver.grpc import dataplane_pb2 as pb

from mlserver_torch_stream.client import EventParser
from tests import plain_http

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """One response from any transport: its outputs by name, and its parameters."""

    outputs: Mapping[str, list[Any]]
    parameters: Mapping[str, Any]
    id: str = ""

    @property
    def text(self) -> str:
        return "".join(self.outputs.get("text_output", []))

    @property
    def finish_reason(self) -> str | None:
        reasons: list[str] = self.outputs.get("finish_reason", [])
        return reasons[0] if reasons else None

    @property
    def final(self) -> bool:
        return bool(self.parameters["triton_final_response"])


def joined(replies: Iterable[Reply]) -> str:
    return "".join(reply.text for reply in replies)


# --- REST ---


def rest_body(
    text: str | None = None, /, *, inputs: Sequence[Mapping[str, Any]] = (), **parameters: Any
) -> dict[str, Any]:
    tensors = [*inputs, *([bytes_tensor("text_input", text)] if text is not None else [])]
    return {"inputs": tensors, "parameters": parameters}


def bytes_tensor(name: str, *elements: str) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(elements)], "data": list(elements)}


def rest_reply(body: Mapping[str, Any]) -> Reply:
    outputs = {tensor["name"]: tensor["data"] for tensor in body["outputs"]}
    return Reply(outputs, body.get("parameters", {}), body.get("id", ""))


def rest_unary(url: str, path: str, body: Mapping[str, Any]) -> Reply:
    response = plain_http.post(f"{url}{path}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return rest_reply(response.json())


def rest_stream(url: str, path: str, body: Mapping[str, Any]) -> list[Reply]:
    response = plain_http.post(f"{url}{path}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return [rest_reply(json.loads(event)) for event in EventParser().feed(response.content)]


# --- gRPC ---


def grpc_request(
    model: str, text: str | None = None, /, *, version: str = "", id: str = "", raw: bool = False, **parameters: Any
) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[key], kind, value)
    if text is not None:
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        encoded = text.encode()
        if raw:
            request.raw_input_contents.append(len(encoded).to_bytes(4, "little") + encoded)
        else:
            tensor.contents.bytes_contents.append(encoded)
    return request


def grpc_reply(response: pb.ModelInferResponse) -> Reply:
    outputs = {}
    for position, tensor in enumerate(response.outputs):
        if response.raw_output_contents:
            outputs[tensor.name] = _from_raw(tensor.datatype, response.raw_output_contents[position])
        else:
            contents = tensor.contents
            fields = {"BYTES": contents.bytes_contents, "UINT32": contents.uint_contents}
            outputs[tensor.name] = [_text(element) for element in fields[tensor.datatype]]
    parameters = {
        key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in response.parameters.items()
    }
    return Reply(outputs, parameters, response.id)


def _from_raw(datatype: str, raw: bytes) -> list[Any]:
    elements: list[Any] = []
    while raw:
        size = int.from_bytes(raw[:4], "little")
        if datatype == "UINT32":
            elements.append(size)
            raw = raw[4:]
        else:
            elements.append(raw[4 : 4 + size].decode())
            raw = raw[4 + size :]
    return elements


def _text(element: Any) -> Any:
    return element.decode() if isinstance(element, bytes) else element
