"""Server reflection: a client without any message definitions learns each port's services by it, and calls them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from mlserver_torch_stream.server.grpc.reflection import METHOD, SERVICES, ReflectionRequest, ReflectionResponse
from tests.server.harness import Server

_MLSERVER = "inference.GRPCInferenceService"
_TORCHSERVE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"


def _ask(channel: grpc.Channel, service: str, *requests: dict[str, Any]) -> list[Any]:
    call = channel.stream_stream(
        f"/{service}/{METHOD}",
        request_serializer=ReflectionRequest.SerializeToString,
        response_deserializer=ReflectionResponse.FromString,
    )
    return list(call(iter([ReflectionRequest(**each) for each in requests]), timeout=30))


def _learned(channel: grpc.Channel, service: str) -> Any:
    """Returns the descriptor of a service, from the file that the server sends."""
    (response,) = _ask(channel, SERVICES[1], {"file_containing_symbol": service})
    pool = descriptor_pool.DescriptorPool()
    for file in response.file_descriptor_response.file_descriptor_proto:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    return pool.FindServiceByName(service)


def _call(channel: grpc.Channel, method: Any, **fields: Any) -> Any:
    request, response = (message_factory.GetMessageClass(each) for each in (method.input_type, method.output_type))
    call = channel.unary_unary(
        f"/{method.containing_service.full_name}/{method.name}", request.SerializeToString, response.FromString
    )
    return call(request(**fields), timeout=30)


@pytest.mark.parametrize("service", SERVICES)
def test_each_port_lists_its_services(triton: Server, service: str) -> None:
    ours = {_MLSERVER, "inference.model_repository.ModelRepositoryService", _TORCHSERVE}
    for target, named in ((triton.grpc_target, ours), (triton.triton_target, {_MLSERVER})):
        with grpc.insecure_channel(target) as channel:
            (response,) = _ask(channel, service, {"list_services": ""})
        assert {each.name for each in response.list_services_response.service} == {*named, *SERVICES}


def test_the_services_are_called_by_what_was_learned(triton: Server) -> None:
    with grpc.insecure_channel(triton.grpc_target) as channel:
        mlserver, torchserve = _learned(channel, _MLSERVER), _learned(channel, _TORCHSERVE)
        assert _call(channel, mlserver.methods_by_name["ServerLive"]).live
        assert "status" in _call(channel, torchserve.methods_by_name["Ping"]).health
        assert mlserver.methods_by_name["ModelStreamInfer"].output_type.name == "ModelInferResponse"
    with grpc.insecure_channel(triton.triton_target) as channel:
        learned = _learned(channel, _MLSERVER)
        config = _call(channel, learned.methods_by_name["ModelConfig"], name="tiny").config
        assert config.name == "tiny" and config.model_transaction_policy.decoupled
        framed = learned.methods_by_name["ModelStreamInfer"].output_type
        assert framed.fields_by_name["infer_response"].message_type.name == "ModelInferResponse"


def test_what_is_not_there_is_said_and_the_stream_goes_on(triton: Server) -> None:
    with grpc.insecure_channel(triton.grpc_target) as channel:
        missing, file, none = _ask(
            channel,
            SERVICES[0],
            {"file_containing_symbol": "a.b"},
            {"file_by_filename": "dataplane.proto"},
            {"file_containing_extension": {"containing_type": "x", "extension_number": 1}},
        )
    for each in (missing, none):
        assert each.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert len(file.file_descriptor_response.file_descriptor_proto) == 1
    assert file.original_request.file_by_filename == "dataplane.proto"
