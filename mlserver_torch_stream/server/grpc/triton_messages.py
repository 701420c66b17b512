"""The messages of Triton's gRPC service that MLServer's service lacks, in a separate descriptor pool.

Triton's and MLServer's messages are in the same protobuf package, ``inference``, so they cannot share the default pool.
Messages that both services have are the same on the wire, so MLServer's classes are used for them. Field names, numbers
and types come from Triton's ``grpc_service.proto`` and ``model_config.proto``; fields that this server never fills are
left out.
"""

from __future__ import annotations

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from mlserver_torch_stream.message_pool import Enums, Fields, message_classes, message_file

_DURATIONS = (
    *("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"),
    *("cache_hit", "cache_miss"),
)
_FIELDS: Fields = {
    # A nested message is encoded like bytes, so the field takes MLServer's serialized ModelInferResponse.
    "ModelStreamInferResponse": {"error_message": (1, "string"), "infer_response": (2, "bytes")},
    "ModelConfigResponse": {"config": (1, "ModelConfig")},
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "ModelInput*"),
        "output": (6, "ModelOutput*"),
        "backend": (17, "string"),
        "model_transaction_policy": (19, "ModelTransactionPolicy"),
    },
    "ModelInput": {
        "name": (1, "string"),
        "data_type": (2, "DataType"),
        "dims": (4, "int64*"),
        "optional": (8, "bool"),
    },
    "ModelOutput": {"name": (1, "string"), "data_type": (2, "DataType"), "dims": (3, "int64*")},
    "ModelTransactionPolicy": {"decoupled": (1, "bool")},
    "ModelStatisticsResponse": {"model_stats": (1, "ModelStatistics*")},
    "ModelStatistics": {
        "name": (1, "string"),
        "version": (2, "string"),
        "last_inference": (3, "uint64"),
        "inference_count": (4, "uint64"),
        "execution_count": (5, "uint64"),
        "inference_stats": (6, "InferStatistics"),
    },
    "InferStatistics": {name: (number, "StatisticDuration") for number, name in enumerate(_DURATIONS, 1)},
    "StatisticDuration": {"count": (1, "uint64"), "ns": (2, "uint64")},
}
_ENUMS: Enums = {
    "DataType": (
        "TYPE_INVALID",
        "TYPE_BOOL",
        "TYPE_UINT8",
        "TYPE_UINT16",
        "TYPE_UINT32",
        "TYPE_UINT64",
        "TYPE_INT8",
        "TYPE_INT16",
        "TYPE_INT32",
        "TYPE_INT64",
        "TYPE_FP16",
        "TYPE_FP32",
        "TYPE_FP64",
        "TYPE_STRING",
        "TYPE_BF16",
    )
}
_message_class = message_classes("inference", _FIELDS, _ENUMS)

ModelStreamInferResponse = _message_class("ModelStreamInferResponse")
ModelConfigResponse = _message_class("ModelConfigResponse")
ModelStatisticsResponse = _message_class("ModelStatisticsResponse")


def triton_file(mlservers: FileDescriptor) -> FileDescriptorProto:
    """Returns the descriptor of the whole service: ``mlservers``, which is MLServer's descriptor, with Triton's
    additional messages.
    """
    file = FileDescriptorProto()
    mlservers.CopyToProto(file)
    ours = message_file(file.package, _FIELDS, _ENUMS, file.syntax)
    file.enum_type.extend(ours.enum_type)
    file.message_type.extend(ours.message_type)
    (stream,) = (message for message in file.message_type if message.name == "ModelStreamInferResponse")
    (response,) = (field for field in stream.field if field.name == "infer_response")
    response.type, response.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{file.package}.ModelInferResponse"
    (service,) = file.service
    for method in service.method:
        if method.name == "ModelStreamInfer":
            method.output_type = f".{file.package}.{stream.name}"
    for name in ("ModelConfig", "ModelStatistics"):
        taken, given = f".{file.package}.ModelMetadataRequest", f".{file.package}.{name}Response"  # the same two fields
        service.method.add(name=name, input_type=taken, output_type=given)
    return file
