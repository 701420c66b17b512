"""TorchServe's gRPC service as its clients see it: messages as protoc describes them, and a stub of the usual form.

Does not use the server's own descriptions. The messages are in a separate descriptor pool.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, empty_pb2, message_factory, text_format

_PACKAGE = "org.pytorch.serve.grpc.inference"
_FILES = """
name: "google/rpc/status.proto" package: "google.rpc" syntax: "proto3"
message_type {
  name: "Status"
  field { name: "code" number: 1 label: LABEL_OPTIONAL type: TYPE_INT32 }
  field { name: "message" number: 2 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "details" number: 3 label: LABEL_REPEATED type: TYPE_BYTES }
}
---
name: "inference.proto" package: "org.pytorch.serve.grpc.inference" syntax: "proto3"
dependency: "google/rpc/status.proto"
message_type {
  name: "PredictionsRequest"
  field { name: "model_name" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "model_version" number: 2 label: LABEL_OPTIONAL type: TYPE_STRING }
  field {
    name: "input" number: 3 label: LABEL_REPEATED type: TYPE_MESSAGE
    type_name: ".org.pytorch.serve.grpc.inference.PredictionsRequest.InputEntry"
  }
  field {
    name: "sequence_id" number: 4 label: LABEL_OPTIONAL type: TYPE_STRING oneof_index: 0 proto3_optional: true
  }
  oneof_decl { name: "_sequence_id" }
  nested_type {
    name: "InputEntry"
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_BYTES }
    options { map_entry: true }
  }
}
message_type {
  name: "PredictionResponse"
  field { name: "prediction" number: 1 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field {
    name: "sequence_id" number: 2 label: LABEL_OPTIONAL type: TYPE_STRING oneof_index: 0 proto3_optional: true
  }
  field {
    name: "status" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".google.rpc.Status"
    oneof_index: 1 proto3_optional: true
  }
  oneof_decl { name: "_sequence_id" }
  oneof_decl { name: "_status" }
}
message_type {
  name: "TorchServeHealthResponse"
  field { name: "health" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
}
"""


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for text in _FILES.split("---"):
        file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _pool()


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


PredictionsRequest = _class("PredictionsRequest")
PredictionResponse = _class("PredictionResponse")
TorchServeHealthResponse = _class("TorchServeHealthResponse")


class Stub:
    """Has the methods of ``InferenceAPIsServiceStub`` in ``inference_pb2_grpc``."""

    def __init__(self, channel: grpc.Channel) -> None:
        service = f"/{_PACKAGE}.InferenceAPIsService/"
        prediction = {
            "request_serializer": lambda request: request.SerializeToString(deterministic=True),  # maps by their keys
            "response_deserializer": PredictionResponse.FromString,
        }
        self.Ping = channel.unary_unary(
            f"{service}Ping",
            request_serializer=empty_pb2.Empty.SerializeToString,
            response_deserializer=TorchServeHealthResponse.FromString,
        )
        self.Predictions = channel.unary_unary(f"{service}Predictions", **prediction)
        self.StreamPredictions = channel.unary_stream(f"{service}StreamPredictions", **prediction)
        self.StreamPredictions2 = channel.stream_stream(f"{service}StreamPredictions2", **prediction)
