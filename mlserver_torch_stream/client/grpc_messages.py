"""The messages of V2 over gRPC that the client needs, built without MLServer, whose import loads a whole server.

Their fields have MLServer's numbers and types; nested messages and maps are spelled flat, which are the same bytes.
"""

from __future__ import annotations

from mlserver_torch_stream.message_pool import Fields, message_classes

_FIELDS: Fields = {
    "InferParameter": {"bool_param": (1, "bool"), "int64_param": (2, "int64"), "string_param": (3, "string")},
    "ParameterEntry": {"key": (1, "string"), "value": (2, "InferParameter")},
    "InferTensorContents": {
        "bool_contents": (1, "bool*"),
        "int_contents": (2, "int32*"),
        "int64_contents": (3, "int64*"),
        "uint_contents": (4, "uint32*"),
        "uint64_contents": (5, "uint64*"),
        "fp32_contents": (6, "float*"),
        "fp64_contents": (7, "double*"),
        "bytes_contents": (8, "bytes*"),
    },
    "InferTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "int64*"),
        "parameters": (4, "ParameterEntry*"),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "ParameterEntry*"),
        "inputs": (5, "InferTensor*"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "ParameterEntry*"),
        "outputs": (5, "InferTensor*"),
    },
    "RepositoryIndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "ModelIndex": {"name": (1, "string"), "version": (2, "string"), "state": (3, "string"), "reason": (4, "string")},
    "RepositoryIndexResponse": {"models": (1, "ModelIndex*")},
}

_message = message_classes("mlserver_torch_stream.client", _FIELDS, {}, syntax="proto2")

ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
RepositoryIndexRequest = _message("RepositoryIndexRequest")
RepositoryIndexResponse = _message("RepositoryIndexResponse")
