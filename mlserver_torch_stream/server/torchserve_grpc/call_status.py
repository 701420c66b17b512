"""An error as a client of TorchServe's gRPC service sees it: a status code, and a text of two lines.

Knows nothing of where errors are raised. Codes by HTTP status and the second lines, names of TorchServe's classes, are
TorchServe's own.
"""

from __future__ import annotations

import grpc

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.server.rest.prediction_errors import NoSuchModel, NoSuchVersion
from mlserver_torch_stream.server.status import details_that_fit
from mlserver_torch_stream.server.torchserve_grpc.inference_messages import ErrorInfo
from mlserver_torch_stream.torchserve.management_refusal import ManagementRefusal

_ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    416: grpc.StatusCode.OUT_OF_RANGE,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# The first row whose class an error has.
_REASONS: tuple[tuple[type[RequestError], str], ...] = (
    (NoSuchModel, "org.pytorch.serve.archive.model.ModelNotFoundException"),
    (NoSuchVersion, "org.pytorch.serve.archive.model.ModelVersionNotFoundException"),
    (InvalidInput, "BadRequestException.()"),
    (RequestError, "org.pytorch.serve.http.InternalServerException"),
)


# The packages of the management API's exceptions; all other exceptions are in org.pytorch.serve.http.
_PACKAGES = {
    "ModelNotFoundException": "org.pytorch.serve.archive.model",
    "ModelVersionNotFoundException": "org.pytorch.serve.archive.model",
    "InvalidModelException": "org.pytorch.serve.archive.model",
    "InvalidKeyException": "org.pytorch.serve.archive.model",
    "DownloadArchiveException": "org.pytorch.serve.archive",
}


def code_of(error: RequestError) -> grpc.StatusCode:
    if isinstance(error, InvalidInput):
        return grpc.StatusCode.INVALID_ARGUMENT
    other = grpc.StatusCode.FAILED_PRECONDITION if error.status < 500 else grpc.StatusCode.INTERNAL
    return _CODES.get(error.status, other)


def end_call(context: grpc.ServicerContext, error: RequestError) -> None:
    """Ends the call with the status of the error."""
    context.set_code(code_of(error))
    context.set_details(f"{details_that_fit(error.message)}\n{_reason(error)}")


def status_fields(error: RequestError) -> dict[str, object]:
    """The error as the fields of a ``Status`` inside a response."""
    detail = ErrorInfo(reason=_reason(error)).SerializeToString()
    return {
        "code": code_of(error).value[0],
        "message": error.message,
        "details": [{"type_url": _ERROR_INFO, "value": detail}],
    }


def _reason(error: RequestError) -> str:
    if isinstance(error, ManagementRefusal):
        return f"{_PACKAGES.get(error.kind, 'org.pytorch.serve.http')}.{error.kind}"
    return next(reason for kind, reason in _REASONS if isinstance(error, kind))
