"""The messages of streams are those that MLServer's converter makes of its own model of the same responses."""

from __future__ import annotations

from typing import Any

import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.converters import ModelInferResponseConverter

from mlserver_torch_stream.protocol.v2_outputs import as_response, output, response
from mlserver_torch_stream.server.response_message import StreamedResponse, install, response_message

_OUTPUTS = [
    output("text_output", ["Grüße", ""]),
    output("token_ids", [1, -2, 3], [1, 3]),
    output("num_output_tokens", [7]),
    output("cumulative_logprob", [-1.5]),
    {"name": "raw", "shape": [1], "datatype": "BYTES", "data": [b"\xff\x00"], "parameters": {"content_type": "base64"}},
    {"name": "flags", "shape": [2], "datatype": "BOOL", "data": [True, False]},
    *(
        {"name": datatype, "shape": [2], "datatype": datatype, "data": [1, 2]}
        for datatype in ("UINT8", "UINT16", "UINT64", "INT8", "INT16", "INT32", "FP32")
    ),
]
_PARAMETERS: dict[str, Any] = {
    "request_id": "r",
    "index": 0,
    "triton_final_response": True,
    "dropped": 0.5,
    "too": {"a": "list"},
}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("version", [None, "v2"])
def test_a_message_is_that_of_mlservers_converter(version: str | None, raw: bool) -> None:
    body = {**response("m", version, "r", _PARAMETERS, _OUTPUTS), "error": "it broke"}
    expected = ModelInferResponseConverter.from_types(as_response(body), use_raw=raw)
    message = pb.ModelInferResponse.FromString(response_message(body, raw=raw).SerializeToString())
    assert message == pb.ModelInferResponse.FromString(expected.SerializeToString())
    assert len(message.outputs) == len(_OUTPUTS) and len(message.parameters) == 3


def test_mlserver_converts_a_streamed_response_with_the_id_that_it_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelInferResponseConverter, "from_types", ModelInferResponseConverter.from_types)
    install()
    body = response("m", None, "r", _PARAMETERS, _OUTPUTS)
    streamed = StreamedResponse(body)
    streamed.id = "first"
    assert ModelInferResponseConverter.from_types(streamed, use_raw=False).id == "first"
    assert ModelInferResponseConverter.from_types(as_response(body), use_raw=False).id == "r"
