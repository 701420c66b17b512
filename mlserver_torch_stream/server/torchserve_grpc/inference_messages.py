"""The messages of TorchServe's gRPC service of inference.

Knows nothing of what they are for. Field names, numbers and types are those of TorchServe's ``inference.proto``, and of
``google.rpc.Status`` and ``ErrorInfo``, which an error of ``StreamPredictions2`` has. On the wire a map is a list of
entries.
"""

from __future__ import annotations

from mlserver_torch_stream.message_pool import Fields, message_classes

_FIELDS: Fields = {
    "PredictionsRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "input": (3, "InputEntry*"),
        "sequence_id": (4, "string"),
    },
    "InputEntry": {"key": (1, "string"), "value": (2, "bytes")},
    "PredictionResponse": {"prediction": (1, "bytes"), "sequence_id": (2, "string"), "status": (3, "Status")},
    "Status": {"code": (1, "int32"), "message": (2, "string"), "details": (3, "Any*")},
    "Any": {"type_url": (1, "string"), "value": (2, "bytes")},
    "ErrorInfo": {"reason": (1, "string")},
    "TorchServeHealthResponse": {"health": (1, "string")},
}
_message_class = message_classes("org.pytorch.serve.grpc.inference", _FIELDS, {})

PredictionsRequest = _message_class("PredictionsRequest")
PredictionResponse = _message_class("PredictionResponse")
ErrorInfo = _message_class("ErrorInfo")
TorchServeHealthResponse = _message_class("TorchServeHealthResponse")
