"""Implements gRPC server reflection, by which clients such as grpcurl learn the services and messages of a port.

It implements ``v1`` and ``v1alpha`` of gRPC's ``reflection.proto``, which are the same on the wire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from mlserver.errors import MLServerError
from mlserver.grpc import dataplane_pb2, model_repository_pb2

from mlserver_torch_stream.message_pool import Fields, message_classes
from mlserver_torch_stream.server.grpc.messages import read_message, refuse

_FIELDS: Fields = {
    "ServerReflectionRequest": {
        "host": (1, "string"),
        "file_by_filename": (3, "string"),
        "file_containing_symbol": (4, "string"),
        "file_containing_extension": (5, "ExtensionRequest"),
        "all_extension_numbers_of_type": (6, "string"),
        "list_services": (7, "string"),
    },
    "ExtensionRequest": {"containing_type": (1, "string"), "extension_number": (2, "int32")},
    "ServerReflectionResponse": {
        "valid_host": (1, "string"),
        "original_request": (2, "ServerReflectionRequest"),
        "file_descriptor_response": (4, "FileDescriptorResponse"),
        "all_extension_numbers_response": (5, "ExtensionNumberResponse"),
        "list_services_response": (6, "ListServiceResponse"),
        "error_response": (7, "ErrorResponse"),
    },
    "FileDescriptorResponse": {"file_descriptor_proto": (1, "bytes*")},
    "ExtensionNumberResponse": {"base_type_name": (1, "string"), "extension_number": (2, "int32*")},
    "ListServiceResponse": {"service": (1, "ServiceResponse*")},
    "ServiceResponse": {"name": (1, "string")},
    "ErrorResponse": {"error_code": (1, "int32"), "error_message": (2, "string")},
}
_message_class = message_classes("grpc.reflection", _FIELDS, {}, syntax="proto2")
ReflectionRequest = _message_class("ServerReflectionRequest")
ReflectionResponse = _message_class("ServerReflectionResponse")
SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
METHOD = "ServerReflectionInfo"
_PATHS = frozenset(f"/{service}/{METHOD}" for service in SERVICES)


class Reflection(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Describes the services of ``files``, which must not import each other."""

    def __init__(self, files: Sequence[FileDescriptorProto]) -> None:
        self._pool = DescriptorPool()
        for file in files:
            self._pool.AddSerializedFile(file.SerializeToString())
        described = [f"{file.package}.{service.name}" for file in files for service in file.service]
        self._names = sorted([*described, *SERVICES])
        self._method = grpc.stream_stream_rpc_method_handler(self._answer)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._method if handler_call_details.method in _PATHS else None

    async def _answer(self, messages: AsyncIterator[bytes], context: grpc.ServicerContext) -> AsyncIterator[bytes]:
        async for message in messages:
            try:
                request: Any = read_message(ReflectionRequest, message)
            except MLServerError as error:
                refuse(context, error)
                return
            yield bytes(self._response(request).SerializeToString())

    def _response(self, request: Any) -> Any:
        response: Any = ReflectionResponse(valid_host=request.host, original_request=request)
        try:
            if request.HasField("list_services"):
                for name in self._names:
                    response.list_services_response.service.add(name=name)
            elif request.HasField("file_by_filename"):
                self._show(self._pool.FindFileByName(request.file_by_filename), response)
            elif request.HasField("file_containing_symbol"):
                self._show(self._pool.FindFileContainingSymbol(request.file_containing_symbol), response)
            elif request.HasField("all_extension_numbers_of_type"):
                name = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type).full_name
                response.all_extension_numbers_response.base_type_name = name
            else:
                raise KeyError("there are no extensions")
        except KeyError as error:
            response.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
            response.error_response.error_message = str(error.args[0])
        return response

    @staticmethod
    def _show(file: FileDescriptor, response: Any) -> None:
        response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)


def mlserver_files() -> list[FileDescriptorProto]:
    """Returns the descriptors of the files that define MLServer's services."""
    files = []
    for module in (dataplane_pb2, model_repository_pb2):
        files.append(FileDescriptorProto())
        module.DESCRIPTOR.CopyToProto(files[-1])
    return files
