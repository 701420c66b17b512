"""The messages of V2 over gRPC that the client needs, built without MLServer, whose import loads a whole server.

They lie in a descriptor pool of their own, so they stand beside MLServer's and Triton's in one process. Their fields
have MLServer's numbers and types; nested messages and maps are spelled flat, which are the same bytes.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "mlserver_torch_stream.client"
_Field = descriptor_pb2.FieldDescriptorProto

# Message -> its fields, numbered from 1.
_MESSAGES = {
    "InferParameter": ("bool bool_param", "int64 int64_param", "string string_param"),
    "ParameterEntry": ("string key", "InferParameter value"),
    "InferTensorContents": (
        "repeated bool bool_contents",
        "repeated int32 int_contents",
        "repeated int64 int64_contents",
        "repeated uint32 uint_contents",
        "repeated uint64 uint64_contents",
        "repeated float fp32_contents",
        "repeated double fp64_contents",
        "repeated bytes bytes_contents",
    ),
    "InferTensor": (
        "string name",
        "string datatype",
        "repeated int64 shape",
        "repeated ParameterEntry parameters",
        "InferTensorContents contents",
    ),
    "ModelInferRequest": (
        "string model_name",
        "string model_version",
        "string id",
        "repeated ParameterEntry parameters",
        "repeated InferTensor inputs",
    ),
    "ModelInferResponse": (
        "string model_name",
        "string model_version",
        "string id",
        "repeated ParameterEntry parameters",
        "repeated InferTensor outputs",
    ),
    "RepositoryIndexRequest": ("string repository_name", "bool ready"),
    "ModelIndex": ("string name", "string version", "string state", "string reason"),
    "RepositoryIndexResponse": ("repeated ModelIndex models",),
}


def _file() -> Any:
    """In proto2's syntax, whose fields know whether they were sent."""
    file = descriptor_pb2.FileDescriptorProto(name="v2_client.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields, 1):
            *repeated, kind, field_name = text.split()
            label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=number, label=label)
            if kind in _MESSAGES:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
RepositoryIndexRequest = _message("RepositoryIndexRequest")
RepositoryIndexResponse = _message("RepositoryIndexResponse")
