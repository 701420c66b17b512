"""The messages of TorchServe's gRPC service of management, as management.proto numbers them, and the service's name.

Knows nothing of the server's own descriptions.
"""

from __future__ import annotations

from mlserver_torch_stream.message_pool import Fields, message_classes

SERVICE = "org.pytorch.serve.grpc.management.ManagementAPIsService"
_NAMED = {"model_name": (1, "string"), "model_version": (2, "string")}
_MESSAGES: Fields = {
    "ManagementResponse": {"msg": (1, "string")},
    "DescribeModel": {**_NAMED, "customized": (3, "bool")},
    "ListModels": {"limit": (1, "int32"), "next_page_token": (2, "int32")},
    "RegisterModel": {
        "batch_size": (1, "int32"),
        "initial_workers": (3, "int32"),
        "model_name": (5, "string"),
        "synchronous": (8, "bool"),
        "url": (9, "string"),
        "s3_sse_kms": (10, "bool"),
    },
    "ScaleWorker": {**_NAMED, "max_worker": (3, "int32"), "min_worker": (4, "int32"), "synchronous": (6, "bool")},
    "SetDefault": _NAMED,
    "UnregisterModel": _NAMED,
}
management_message = message_classes("org.pytorch.serve.grpc.management", _MESSAGES, {})
