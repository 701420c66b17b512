"""The messages of TorchServe's gRPC service of management.

Field names, numbers and types are those of TorchServe's ``management.proto``.
"""

from __future__ import annotations

from mlserver_torch_stream.message_pool import Fields, message_classes

_FIELDS: Fields = {
    "ManagementResponse": {"msg": (1, "string")},
    "DescribeModelRequest": {"model_name": (1, "string"), "model_version": (2, "string"), "customized": (3, "bool")},
    "ListModelsRequest": {"limit": (1, "int32"), "next_page_token": (2, "int32")},
    "RegisterModelRequest": {
        "batch_size": (1, "int32"),
        "handler": (2, "string"),
        "initial_workers": (3, "int32"),
        "max_batch_delay": (4, "int32"),
        "model_name": (5, "string"),
        "response_timeout": (6, "int32"),
        "runtime": (7, "string"),
        "synchronous": (8, "bool"),
        "url": (9, "string"),
        "s3_sse_kms": (10, "bool"),
        "startup_timeout": (11, "int32"),
    },
    "ScaleWorkerRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "max_worker": (3, "int32"),
        "min_worker": (4, "int32"),
        "number_gpu": (5, "int32"),
        "synchronous": (6, "bool"),
        "timeout": (7, "int32"),
    },
    "SetDefaultRequest": {"model_name": (1, "string"), "model_version": (2, "string")},
    "UnregisterModelRequest": {"model_name": (1, "string"), "model_version": (2, "string")},
}
message_class = message_classes("org.pytorch.serve.grpc.management", _FIELDS, {})
