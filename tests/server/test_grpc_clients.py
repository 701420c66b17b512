"""gRPC as Triton's and KServe's clients use it: fields and parameters that MLServer's own messages do not have."""

from __future__ import annotations

import struct
import subprocess
import sys

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests.server import v2
from tests.server.harness import Server


def _with(name: str, field: bytes) -> pb.ModelInferRequest:
    """Returns a request with a parameter that uses one of Triton's fields."""
    request = v2.grpc_request("tiny", "Hello fox", max_tokens=12, ignore_eos=True)
    request.parameters[name].MergeFromString(field)
    return request


def _double(value: float) -> bytes:
    return b"\x21" + struct.pack("<d", value)


def _text(stub: Stub, request: pb.ModelInferRequest) -> str:
    return v2.grpc_reply(stub.ModelInfer(request, timeout=v2.TIMEOUT_S)).text


def test_fractions_and_integers_without_a_sign_are_read(stub: Stub) -> None:
    request = _with("temperature", _double(0.8))
    request.parameters["seed"].MergeFromString(b"\x28\x05")
    plain = v2.grpc_request("tiny", "Hello fox", max_tokens=12, ignore_eos=True, temperature="0.8", seed=5)
    assert _text(stub, request) == _text(stub, plain)
    (first, *_) = [v2.grpc_reply(each) for each in stub.ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S)]
    assert _text(stub, plain).startswith(first.text)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (_double(float("nan")), "temperature: must be a finite number"),
        (_double(-1.0), "temperature: must be between"),
        (b"\x20\x01", "temperature: has no value"),  # the double's number, but a varint
        (b"\x30\x01", "temperature: has no value"),  # a number that nobody has
        (b"", "temperature: has no value"),
    ],
)
def test_what_is_no_value_is_refused_by_name(stub: Stub, field: bytes, said: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        _text(stub, _with("temperature", field))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in caught.value.details()


@pytest.mark.parametrize("size", [9, 8, None])
def test_the_size_of_raw_contents_may_be_given_and_must_be_true(stub: Stub, size: int | None) -> None:
    request = v2.grpc_request("tiny", "Hello", raw=True, max_tokens=3)
    if size is not None:
        request.inputs[0].parameters["binary_data_size"].int64_param = size
    if size == 8:
        with pytest.raises(grpc.RpcError) as caught:
            _text(stub, request)
        assert caught.value.details() == "text_input: binary_data_size is 8, but the raw contents have 9 bytes"
    else:
        assert _text(stub, request) == _text(stub, v2.grpc_request("tiny", "Hello", max_tokens=3))


_TRITON = """
import sys
import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("tiny")
prompt = triton.InferInput("text_input", [1], "BYTES")
prompt.set_data_from_numpy(np.array([b"Hello fox"], dtype=np.object_))
options = {"temperature": 0.8, "seed": 5, "max_tokens": 12, "ignore_eos": True}
result = client.infer("tiny", [prompt], priority=3, timeout=60_000_000, parameters=options)
print(result.as_numpy("text_output")[0].decode(), end="")
"""


def test_tritons_client_is_answered(server: Server, stub: Stub) -> None:
    """Runs in a separate process, as its messages have the same names as MLServer's."""
    done = subprocess.run([sys.executable, "-c", _TRITON, server.grpc_target], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    plain = v2.grpc_request("tiny", "Hello fox", max_tokens=12, ignore_eos=True, temperature="0.8", seed=5)
    assert done.stdout.decode() == _text(stub, plain)
