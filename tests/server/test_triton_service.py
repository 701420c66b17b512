"""Triton's calls other than inference: health, metadata, configuration, statistics; all others are refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from mlserver.grpc import dataplane_pb2 as pb

from mlserver_torch_stream.server.grpc.triton_messages import ModelConfigResponse, ModelStatisticsResponse
from tests import plain_http
from tests.server import v2
from tests.server.harness import Server
from tests.server.triton_wire import infer, unary

_METHODS = (
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelInfer",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
)


@pytest.fixture(scope="module")
def channel(triton: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(triton.triton_target) as opened:
        yield opened


def _named(name: str, version: str = "") -> pb.ModelMetadataRequest:
    return pb.ModelMetadataRequest(name=name, version=version)


def _refusal(channel: grpc.Channel, method: str, request: Any = b"") -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        unary(channel, method, request)
    return caught.value


def _statistics(channel: grpc.Channel, name: str = "") -> dict[str, Any]:
    """Returns the statistics by model."""
    response = ModelStatisticsResponse.FromString(unary(channel, "ModelStatistics", _named(name)))
    found = MessageToDict(response, preserving_proto_field_name=True)
    return {each["name"]: each for each in found["model_stats"]}


def test_health_and_metadata(channel: grpc.Channel) -> None:
    assert pb.ServerLiveResponse.FromString(unary(channel, "ServerLive")).live
    assert pb.ServerReadyResponse.FromString(unary(channel, "ServerReady")).ready
    assert pb.ServerMetadataResponse.FromString(unary(channel, "ServerMetadata")).name == "mlserver"
    metadata = pb.ModelMetadataResponse.FromString(unary(channel, "ModelMetadata", _named("tiny", "v1")))
    assert {tensor.name: tensor.datatype for tensor in metadata.inputs}["text_input"] == "BYTES"
    for request in (pb.RepositoryIndexRequest(), pb.RepositoryIndexRequest(ready=True)):
        index = pb.RepositoryIndexResponse.FromString(unary(channel, "RepositoryIndex", request))
        states = {each.name: (each.version, each.state) for each in index.models}
        assert states["tiny"] == ("v1", "READY") and states["foreign"] == ("", "READY")


@pytest.mark.parametrize(
    ("name", "version", "ready"),
    [("tiny", "", True), ("tiny", "v1", True), ("tiny", "v9", False), ("nobody", "", False), ("foreign", "", True)],
)
def test_a_model_that_is_not_there_is_not_ready(channel: grpc.Channel, name: str, version: str, ready: bool) -> None:
    request = pb.ModelReadyRequest(name=name, version=version)
    assert pb.ModelReadyResponse.FromString(unary(channel, "ModelReady", request)).ready == ready


def test_the_configuration_names_tensors_and_says_that_a_model_streams(triton: Server, channel: grpc.Channel) -> None:
    message = ModelConfigResponse.FromString(unary(channel, "ModelConfig", _named("tiny")))
    config = MessageToDict(message, preserving_proto_field_name=True)["config"]
    assert config["name"] == "tiny" and config["model_transaction_policy"] == {"decoupled": True}
    tensors = {tensor["name"]: tensor for tensor in config["input"]}
    assert tensors["text_input"] == {
        "name": "text_input",
        "data_type": "TYPE_STRING",
        "dims": ["-1"],
        "optional": True,
    }
    assert {"name": "num_output_tokens", "data_type": "TYPE_UINT32", "dims": ["-1"]} in config["output"]
    for path in ("tiny", "tiny/versions/v1"):
        rest = plain_http.get(f"{triton.url}/v2/models/{path}/config", timeout=v2.TIMEOUT_S).json()
        assert rest["input"][0]["dims"] == [-1] and len(rest["input"]) == len(config["input"])


def test_another_runtimes_model_has_a_configuration_and_answers_unary_calls(channel: grpc.Channel) -> None:
    config = ModelConfigResponse.FromString(unary(channel, "ModelConfig", _named("foreign"))).config
    assert not config.model_transaction_policy.decoupled
    response = pb.ModelInferResponse.FromString(unary(channel, "ModelInfer", v2.grpc_request("foreign", "a", raw=True)))
    assert response.raw_output_contents == [b"\x01\0\0\0a"]


def test_statistics_count_what_was_answered_and_what_failed(triton: Server, channel: grpc.Channel) -> None:
    before = _statistics(channel, "other").get("other", {})
    infer(channel, v2.grpc_request("other", "Hello", max_tokens=5, ignore_eos=True, n=2))
    _refusal(channel, "ModelInfer", v2.grpc_request("other", "Hello", max_tokens=0))
    after = _statistics(channel, "other")["other"]

    def grown(*path: str) -> int:
        values = []
        for found in (before, after):
            for key in path:
                found = found.get(key, {})
            values.append(int(found or 0))  # type: ignore[call-overload]
        return values[1] - values[0]

    assert grown("inference_count") == 2
    assert grown("execution_count") >= 4
    assert grown("inference_stats", "success", "count") == 1
    assert grown("inference_stats", "fail", "count") == 1
    assert grown("inference_stats", "success", "ns") >= grown("inference_stats", "compute_infer", "ns") > 50e6
    assert int(after["last_inference"]) >= int(before.get("last_inference", 0))
    rest = plain_http.get(f"{triton.url}/v2/models/other/stats", timeout=v2.TIMEOUT_S).json()["model_stats"]
    assert [each["inference_count"] for each in rest] == [int(after["inference_count"])]


def test_statistics_of_all_are_those_of_our_models(triton: Server, channel: grpc.Channel) -> None:
    names = {"tiny", "other", "narrow"}
    assert _statistics(channel).keys() == names
    rest = plain_http.get(f"{triton.url}/v2/models/stats", timeout=v2.TIMEOUT_S).json()
    assert {each["name"] for each in rest["model_stats"]} == names


@pytest.mark.parametrize(
    ("method", "name", "code"),
    [
        ("ModelMetadata", "nobody", grpc.StatusCode.NOT_FOUND),
        ("ModelConfig", "nobody", grpc.StatusCode.NOT_FOUND),
        ("ModelStatistics", "nobody", grpc.StatusCode.NOT_FOUND),
        ("ModelStatistics", "foreign", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_what_a_model_does_not_have_is_refused(
    channel: grpc.Channel, method: str, name: str, code: grpc.StatusCode
) -> None:
    error = _refusal(channel, method, _named(name))
    assert error.code() is code and name in error.details()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("nobody/config", 404),
        ("nobody/stats", 404),
        ("tiny/versions/v9/config", 404),
        ("foreign/config", 404),
        ("foreign/stats", 404),
    ],
)
def test_over_rest_too(triton: Server, path: str, status: int) -> None:
    assert plain_http.get(f"{triton.url}/v2/models/{path}", timeout=v2.TIMEOUT_S).status_code == status


def test_the_index_over_rest_needs_no_body(triton: Server) -> None:
    url = f"{triton.url}/v2/repository/index"
    index = plain_http.post(url, timeout=v2.TIMEOUT_S).json()
    assert index == plain_http.post(url, json={}, timeout=v2.TIMEOUT_S).json()
    assert {each["name"]: each["state"] for each in index}["tiny"] == "READY"
    in_chunks = plain_http.post(url, content=iter([b"[]"]), timeout=v2.TIMEOUT_S)
    assert in_chunks.status_code == 422, "a body is read by MLServer"


@pytest.mark.parametrize(
    ("model", "code"), [("nobody", grpc.StatusCode.NOT_FOUND), ("tiny", grpc.StatusCode.INVALID_ARGUMENT)]
)
def test_a_unary_call_is_refused_with_its_status(channel: grpc.Channel, model: str, code: grpc.StatusCode) -> None:
    assert _refusal(channel, "ModelInfer", v2.grpc_request(model, "Hello", max_tokens=0)).code() is code


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("garbage", [b"\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_message_are_an_invalid_argument(channel: grpc.Channel, method: str, garbage: bytes) -> None:
    try:
        unary(channel, method, garbage)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    else:
        assert method in ("ServerLive", "ServerReady", "ServerMetadata", "RepositoryIndex")  # fields of no meaning


@pytest.mark.parametrize(
    "method",
    [
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    ],
)
def test_what_is_not_served_is_refused_by_name(channel: grpc.Channel, method: str) -> None:
    error = _refusal(channel, method)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details().startswith(f"{method} is not implemented: ")


_COMPARED = """
import tritonclient.grpc.service_pb2 as theirs
from tritonclient.grpc import model_config_pb2
from mlserver_torch_stream.server.grpc import triton_messages as ours

def kind(field):
    return field.number, field.type, field.is_repeated

compared = 0
for name in ours._FIELDS:
    other = getattr(theirs, name, None) or getattr(model_config_pb2, name)
    for field in ours._message_class(name).DESCRIPTOR.fields:
        same = other.DESCRIPTOR.fields_by_name[field.name]
        bare = (name, field.name) == ("ModelStreamInferResponse", "infer_response")
        assert kind(field) == kind(same) or bare and field.number == same.number, (name, field.name)
        compared += 1
assert list(ours._ENUMS["DataType"]) == list(model_config_pb2.DataType.keys())
print(compared)
"""


def test_our_messages_have_the_fields_of_tritons_own_client() -> None:
    """Runs in a separate process, as MLServer's messages have the same names."""
    done = subprocess.run([sys.executable, "-c", _COMPARED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
